"""The sweep of fault_sweep.py over a share of all calls; run as a program it goes through all of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_sweep import BASE, OTHER, Sweep, prepare
from stored_blocks import arrays_of, path_of, sections_of

from cache_store import SnapshotStore

HERE = Path(__file__).parent


@pytest.mark.parametrize("options", [["--sample", "0.3"], ["--sample", "0.2", "--encrypted"]])
def test_after_any_fault_nothing_is_wrong_lost_or_over_budget(options: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "fault_sweep.py"), "--seeds", "1", *options]
    # A process of its own: it forks, which a process with threads must not.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == 0
    assert report["by_fault"]["killed"] > 200
    assert report["by_fault"]["failed"] > 200


def lose(folder: Path) -> None:
    path_of(folder, OTHER.keys[1]).unlink()


def swap_bytes(folder: Path) -> None:
    """The bytes of another block, under a header that vouches for them."""
    store = SnapshotStore(folder, 1 << 20, 0)
    store.remove(OTHER.keys[0])
    assert store.write(OTHER.keys[0], None, OTHER.blocks[0], sections_of(arrays_of(BASE.keys[0])), True, {})


def overfill(folder: Path) -> None:
    (folder / "v1" / "foreign").write_bytes(bytes(1 << 20))


@pytest.mark.parametrize(
    ("harm", "named"),
    [(lose, "lost 1 blocks"), (swap_bytes, "wrong bytes"), (overfill, "bytes on disk, budget")],
)
def test_the_sweep_sees_what_it_looks_for(tmp_path: Path, harm: Callable[[Path], None], named: str) -> None:
    sweep, folder = Sweep(tmp_path), tmp_path / "harmed"
    prepare(folder)
    sweep.check("as it was", "none", shutil.copytree(folder, tmp_path / "copy"), frozenset())
    assert sweep.failures == []
    harm(folder)
    sweep.check("harmed", "none", folder, frozenset())
    assert [named in failure for failure in sweep.failures] == [True]
