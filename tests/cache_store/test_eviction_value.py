from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from stored_blocks import Chain, disk_usage, make_chain, path_of, put

from cache_store import BlockKey, SnapshotStore, usage_by_model

SMALL = 8192
DAY_NS = 86_400 * 10**9


def used_days_ago(folder: Path, key: BlockKey, days: float) -> None:
    path = path_of(folder, key)
    used_ns = path.stat().st_mtime_ns - int(days * DAY_NS)
    os.utime(path, ns=(used_ns, used_ns))


def left(folder: Path, chains: list[Chain]) -> list[bool]:
    return [path_of(folder, chain.keys[0]).exists() for chain in chains]


@pytest.mark.parametrize(
    ("dear_s", "cheap_s", "days", "survivor"),
    [
        (40.0, 10.0, 1.9, "dear"),
        (40.0, 10.0, 2.1, "cheap"),
        (10.0, 10.0, 0.1, "cheap"),
        (1e6, 0.1, 20, "dear"),
    ],
)
def test_what_took_longer_to_compute_stays_twice_as_long_per_doubling(
    tmp_path: Path, dear_s: float, cheap_s: float, days: float, survivor: str
) -> None:
    store = SnapshotStore(tmp_path, 2 * SMALL, 0)
    dear, cheap, new = (make_chain(1, seed) for seed in range(3))
    assert put(store, dear, 0, prefill_s=dear_s)
    assert put(store, cheap, 0, prefill_s=cheap_s)
    used_days_ago(tmp_path, dear.keys[0], days)
    again = SnapshotStore(tmp_path, 2 * SMALL, 0)
    assert put(again, new, 0, prefill_s=1.0)
    assert left(tmp_path, [dear, cheap]) == [survivor == "dear", survivor == "cheap"]


def test_of_two_that_save_the_same_the_larger_goes(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 40 * 4096, 0)
    large, small, new = (make_chain(1, seed) for seed in range(3))
    assert put(store, small, 0, prefill_s=5.0)
    assert put(store, large, 0, pad_bytes=30 * 4096, prefill_s=5.0)
    assert put(store, new, 0, pad_bytes=20 * 4096)
    assert left(tmp_path, [large, small]) == [False, True]


@pytest.mark.parametrize("told", ["much", -1.0, None, [3]])
def test_a_cost_that_makes_no_sense_counts_as_none_told(tmp_path: Path, told: object) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    assert put(store, make_chain(1), 0, prefill_s=told, model=7, tenant=None)
    (entry,) = store.entries()
    assert entry.prefill_s == pytest.approx(0.192)
    assert (entry.model, entry.tenant) == ("", "")


def test_a_shared_base_outlives_dearer_leaves(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * SMALL, 0)
    chain = make_chain(3)
    for index in range(3):
        put(store, chain, index, prefill_s=0.001 if index == 0 else 1000.0)
    assert put(store, make_chain(1, 1), 0)
    assert [path_of(tmp_path, key).exists() for key in chain.keys] == [True, True, False]


def test_a_pinned_block_and_its_bases_are_never_evicted(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 4 * SMALL, 0)
    chain = make_chain(3)
    for index in range(3):
        put(store, chain, index)
        used_days_ago(tmp_path, chain.keys[index], 1000)
    store.pin(chain.keys[1])
    other = SnapshotStore(tmp_path, 4 * SMALL, 0)  # as another process would
    assert other.pins() == {chain.keys[1]}
    for seed in range(1, 6):
        assert put(other, make_chain(1, seed), 0)
    assert [path_of(tmp_path, key).exists() for key in chain.keys] == [True, True, False]
    assert other.unpin(chain.keys[1])
    assert not store.unpin(chain.keys[1])
    for seed in range(6, 10):
        assert put(store, make_chain(1, seed), 0)
    assert [path_of(tmp_path, key).exists() for key in chain.keys] == [False, False, False]


def test_pins_above_a_lowered_budget_stay_and_nothing_more_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, 6 * SMALL, 0)
    chain, loose = make_chain(3), make_chain(3, 1)
    for index in range(3):
        put(store, chain, index)
        put(store, loose, index)
    store.pin(chain.keys[2])
    caplog.set_level(logging.WARNING)
    again = SnapshotStore(tmp_path, 2 * SMALL, 0)
    assert again.match(chain.keys, chain.blocks) == 3
    assert again.match(loose.keys, loose.blocks) == 0
    assert disk_usage(tmp_path) == 3 * SMALL
    assert "pinned" in caplog.text
    assert not put(again, loose, 0)


def test_a_pin_waits_for_its_block_and_goes_when_that_is_removed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2 * SMALL, 0)
    chain = make_chain(1)
    store.pin(chain.keys[0])
    store.pin(chain.keys[0])
    assert put(store, chain, 0)
    for seed in range(1, 4):
        assert put(store, make_chain(1, seed), 0)
    assert store.match(chain.keys, chain.blocks) == 1
    assert store.remove(chain.keys[0])
    assert store.pins() == set()


def test_the_disk_bytes_of_each_model_are_told(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    for seed, model in enumerate(["a", "a", "b"]):
        put(store, make_chain(1, seed), 0, model=model, prefill_s=2.0)
    found = usage_by_model(store)
    usage = {model: (use.num_blocks, use.disk_bytes, use.prefill_s) for model, use in found.items()}
    assert usage == {"a": (2, 2 * SMALL, 4.0), "b": (1, SMALL, 2.0)}
