from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_blocks import disk_usage, files_in, get, make_chain, path_of, put, which

from cache_store import BadBlock, SnapshotStore

SMALL = 8192  # what a block without padding takes


def age(folder: Path, chain: Any, index: int, hours: float) -> None:
    """Make a block's last use lie back."""
    path = path_of(folder, chain.keys[index])
    used_ns = path.stat().st_mtime_ns - int(hours * 3600e9)
    os.utime(path, ns=(used_ns, used_ns))


def stored(folder: Path, chain: Any) -> list[bool]:
    return [path_of(folder, key).exists() for key in chain.keys]


def test_the_least_recently_used_leaf_goes_first_and_shared_bases_stay(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 6 * SMALL, 0)
    base = make_chain(2)
    forks = [make_chain(4, seed) for seed in (1, 2)]
    for index in range(2):
        put(store, base, index)
    for fork in forks:  # two documents that share the base
        fork.keys[:2], fork.blocks[:2] = base.keys, base.blocks
        for index in (2, 3):
            put(store, fork, index)
    for index in range(2):
        age(tmp_path, base, index, hours=100)  # the bases are the oldest files by far
    age(tmp_path, forks[0], 2, hours=50)
    age(tmp_path, forks[0], 3, hours=40)
    new = make_chain(3, seed=3)
    assert put(SnapshotStore(tmp_path, 6 * SMALL, 0), new, 0)
    assert stored(tmp_path, forks[0]) == [True, True, True, False]
    assert put(store, new, 1)
    assert stored(tmp_path, forks[0]) == [True, True, False, False]
    assert stored(tmp_path, forks[1]) == [True] * 4
    age(tmp_path, forks[1], 3, hours=40)
    assert put(store, new, 2)
    assert stored(tmp_path, forks[1]) == [True, True, True, False]
    assert disk_usage(tmp_path) == 6 * SMALL


def test_use_keeps_a_block(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * SMALL, 0)
    chains = [make_chain(1, seed) for seed in range(4)]
    for position, chain in enumerate(chains[:3]):
        put(store, chain, 0)
        age(tmp_path, chain, 0, hours=10 - position)
    other = SnapshotStore(tmp_path, 3 * SMALL, 0)  # another process would see the same file times
    assert store.match(chains[0].keys, chains[0].blocks) == 1
    assert put(other, chains[3], 0)
    assert [stored(tmp_path, chain)[0] for chain in chains] == [True, False, True, True]


def test_use_is_noted_on_disk_at_intervals(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * SMALL, 0, touch_every_s=3600)
    chain = make_chain(1)
    put(store, chain, 0)
    path = path_of(tmp_path, chain.keys[0])
    for hours, noted in ((0.5, False), (2, True), (-2, True)):
        os.utime(path, ns=(0, path.stat().st_ctime_ns - int(hours * 3600e9)))
        before = path.stat().st_mtime_ns
        assert store.match(chain.keys, chain.blocks) == 1
        assert (path.stat().st_mtime_ns != before) == noted


def test_a_chain_longer_than_the_budget_keeps_its_beginning(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * SMALL, 0)
    chain = make_chain(5)
    assert [put(store, chain, index) for index in range(5)] == [True, True, True, False, False]
    assert store.match(chain.keys, chain.blocks) == 3


def test_a_block_whose_parent_is_not_stored_is_not_written(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * SMALL, 0)
    chain = make_chain(2)
    assert not put(store, chain, 1)
    assert put(store, chain, 0)
    assert put(store, chain, 1)


def test_a_block_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 4 * SMALL, 0)
    chains = [make_chain(1, seed) for seed in range(3)]
    for chain in chains[:2]:
        put(store, chain, 0)
    assert not put(store, chains[2], 0, pad_bytes=4 * SMALL)
    assert [stored(tmp_path, chain)[0] for chain in chains] == [True, True, False]
    assert not SnapshotStore(tmp_path / "none", 0, 0).total_bytes


def test_a_smaller_budget_is_held_from_the_start(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 8 * SMALL, 0)
    chain = make_chain(8)
    for index in range(8):
        put(store, chain, index)
    again = SnapshotStore(tmp_path, 3 * SMALL, 0)
    assert again.total_bytes == disk_usage(tmp_path) == 3 * SMALL
    assert again.match(chain.keys, chain.blocks) == 3


def test_the_budget_holds_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 40 * 4096
    store = SnapshotStore(tmp_path, budget, 0)
    highest = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal highest
            result = call(*arguments, **options)
            highest = max(highest, disk_usage(tmp_path))
            return result

        return run

    for name in ("ftruncate", "pwritev", "fsync", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    rng = np.random.default_rng(4)
    chains = [make_chain(4, seed) for seed in range(6)]
    for _ in range(250):
        chain, index = chains[rng.integers(6)], int(rng.integers(4))
        put(store, chain, index, exact=bool(rng.integers(2)), pad_bytes=int(rng.integers(0, 30_000)))
        path = path_of(tmp_path, chain.keys[index])
        if rng.integers(10) == 0 and path.exists():
            with path.open("r+b") as file:
                file.seek(int(rng.integers(4096)))
                file.write(b"damage")
        key = chain.keys[index]
        with suppress(BadBlock):
            assert which(get(store, key), key) != "wrong"
        assert store.total_bytes == disk_usage(tmp_path)
    assert budget - 8 * 4096 < highest <= budget


def test_quarantined_blocks_go_before_good_ones(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 20 * SMALL, 0)
    chains = [make_chain(1, seed) for seed in range(21)]
    for chain in chains[:20]:
        assert put(store, chain, 0)
    path_of(tmp_path, chains[0].keys[0]).write_bytes(bytes(5000))
    assert store.match(chains[0].keys, chains[0].blocks) == 0
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert put(store, chains[20], 0)
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert sum(stored(tmp_path, chain)[0] for chain in chains[1:]) == 20


def test_the_free_disk_floor_evicts_and_then_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 4 * SMALL

    class Disk:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return 1000 + room - sum(path.stat().st_blocks * 512 for path in files_in(tmp_path))

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    store = SnapshotStore(tmp_path, 1 << 30, 1000)
    chains = [make_chain(1, seed) for seed in range(6)]
    for position, chain in enumerate(chains):
        assert put(store, chain, 0)
        age(tmp_path, chain, 0, hours=10 - position)
    assert [stored(tmp_path, chain)[0] for chain in chains] == [False, False, True, True, True, True]
    room = -1
    assert not put(SnapshotStore(tmp_path, 1 << 30, 1 << 30), chains[0], 0)
    assert sum(stored(tmp_path, chain)[0] for chain in chains) == 4


def test_the_floor_of_a_real_disk_refuses_without_evicting(tmp_path: Path) -> None:
    chains = [make_chain(1, seed) for seed in range(2)]
    assert put(SnapshotStore(tmp_path, 1 << 30, 0), chains[0], 0)
    store = SnapshotStore(tmp_path, 1 << 30, min_free_bytes=1 << 60)
    assert not put(store, chains[1], 0)
    assert store.match(chains[0].keys, chains[0].blocks) == 1


def test_an_exact_block_replaces_a_continued_one_and_never_the_reverse(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(1)
    key = chain.keys[0]
    for exact, wanted in ((False, "continued"), (True, "exact"), (False, "exact"), (True, "exact")):
        assert put(store, chain, 0, exact)
        info = store.info(key)
        assert info is not None
        assert info.exact == (wanted == "exact")
        assert which(get(store, key), key) == wanted
    assert [entry.exact for entry in store.entries()] == [True]


def test_a_removed_block_is_a_miss(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    chain = make_chain(2)
    put(store, chain, 0)
    put(store, chain, 1)
    assert store.remove(chain.keys[1])
    assert not store.remove(chain.keys[1])
    assert store.match(chain.keys, chain.blocks) == 1
    assert store.total_bytes == SMALL


def test_the_index_is_rebuilt_from_the_files_alone(tmp_path: Path) -> None:
    chains = [make_chain(5, seed) for seed in range(8)]
    first = SnapshotStore(tmp_path, 1 << 30, 0)
    for chain in chains:
        for index in range(5):
            put(first, chain, index, exact=index < 3)
    again = SnapshotStore(tmp_path, 1 << 30, 0)
    found = {entry.key: (entry.parent, entry.exact, entry.num_tokens) for entry in again.entries()}
    assert found == {
        key: (chain.keys[i - 1] if i else None, i < 3, chain.blocks[i].size)
        for chain in chains
        for i, key in enumerate(chain.keys)
    }
    assert again.total_bytes == first.total_bytes == disk_usage(tmp_path)


def test_a_clock_that_was_ahead_makes_no_block_immortal(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2 * SMALL, 0)
    chains = [make_chain(1, seed) for seed in range(4)]
    for chain in chains[:2]:
        put(store, chain, 0)
        age(tmp_path, chain, 0, hours=-1000)
    for chain in chains[2:]:
        assert put(store, chain, 0)
    assert disk_usage(tmp_path) == 2 * SMALL
    assert store.match(chains[3].keys, chains[3].blocks) == 1


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    store = SnapshotStore(folder, 1 << 20, 0)
    chain = make_chain(1)
    put(store, chain, 0)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert store.match(chain.keys, chain.blocks) == 0
    assert store.total_bytes == 0
    assert put(store, chain, 0)
    assert store.match(chain.keys, chain.blocks) == 1


@pytest.mark.parametrize("numbers", [(-1, 0), (1, -1)])
def test_negative_limits_are_refused(tmp_path: Path, numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        SnapshotStore(tmp_path, *numbers)
