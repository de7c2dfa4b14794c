"""Several processes, and processes that die, on one folder."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from stored_blocks import disk_usage, files_in, get, make_chain, put, which

from cache_store import SnapshotStore

HERE = Path(__file__).parent
BUDGET = 3 * 8192


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_that_write_evict_and_remove_the_same_keys_agree(tmp_path: Path) -> None:
    budget = 12 * 12288
    workers = [start("share_folder.py", tmp_path, seed, 250, budget) for seed in range(3)]
    outputs = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    for output in outputs:
        seen = json.loads(output)
        assert seen["written"] > 30
        assert seen["read"] > 30
    store = SnapshotStore(tmp_path, budget, 0)
    assert store.total_bytes == disk_usage(tmp_path) <= budget
    assert [path for path in files_in(tmp_path) if path.suffix == ".tmp"] == []
    assert not (tmp_path / "quarantine").exists()
    for entry in store.entries():
        assert which(get(store, entry.key), entry.key) != "wrong"


def test_a_block_that_another_process_wrote_or_evicted_is_seen(tmp_path: Path) -> None:
    ours, theirs = (SnapshotStore(tmp_path, 1 << 20, 0) for _ in range(2))
    chain = make_chain(2)
    put(theirs, chain, 0)
    assert ours.match(chain.keys, chain.blocks) == 1
    put(ours, chain, 1)
    assert theirs.match(chain.keys, chain.blocks) == 2
    assert ours.total_bytes == theirs.total_bytes == disk_usage(tmp_path)
    theirs.remove(chain.keys[0])
    assert ours.match(chain.keys, chain.blocks) == 0
    assert [entry.key for entry in ours.entries()] == [chain.keys[1]]


def test_a_living_writers_file_is_not_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path, BUDGET, 0)
    chain, other = make_chain(1), make_chain(1, seed=1)
    sync = os.fsync
    seen: list[int] = []

    def meanwhile(fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return sync(fd)
        monkeypatch.setattr(os, "fsync", sync)
        seen.append(len(files_in(tmp_path)))
        second = SnapshotStore(tmp_path, BUDGET, 0)  # cleans at start
        assert put(second, other, 0)
        seen.append(second.total_bytes)
        return sync(fd)

    put(store, make_chain(1, seed=2), 0)
    monkeypatch.setattr(os, "fsync", meanwhile)
    assert put(store, chain, 0)
    assert seen == [2, 3 * 8192]
    assert store.match(chain.keys, chain.blocks) == 1
    assert store.match(other.keys, other.blocks) == 1


def test_importing_the_store_loads_no_model_library() -> None:
    code = (
        "import sys, cache_store; ours = {'api', 'worker', 'kernels', 'jobs', 'cli'};"
        "sys.exit(bool(({'mlx', 'mlx.core', 'torch'} | ours) & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
