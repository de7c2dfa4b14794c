from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_blocks import arrays_of, make_chain, path_of, put, same

from cache_store import BadBlock, BlockInfo, SnapshotStore

NUM_BLOCKS = 12
CHAIN = make_chain(NUM_BLOCKS)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path, budget_bytes=64 << 20, min_free_bytes=0)
    for index in range(NUM_BLOCKS):
        assert put(store, CHAIN, index)
    return store


def places() -> list[list[np.ndarray[Any, Any]]]:
    return [[np.zeros_like(array) for array in arrays_of(key)] for key in CHAIN.keys]


def test_blocks_read_ahead_come_in_order_and_whole(store: SnapshotStore) -> None:
    arrays = places()
    for index, info in enumerate(store.read_each(CHAIN.keys, ([a.data for a in block] for block in arrays))):
        assert info.key == CHAIN.keys[index]
        assert same(arrays[index], arrays_of(CHAIN.keys[index]))
    assert index == NUM_BLOCKS - 1


@pytest.mark.parametrize("bad", [0, 1, 7, NUM_BLOCKS - 1])
def test_a_bad_block_ends_reading_ahead_there_and_nothing_else_is_lost(
    store: SnapshotStore, tmp_path: Path, bad: int
) -> None:
    path = path_of(tmp_path, CHAIN.keys[bad])
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    arrays: list[list[Any]] = places()
    found: list[BlockInfo] = []
    with pytest.raises(BadBlock, match=CHAIN.keys[bad].hex):
        found.extend(store.read_each(CHAIN.keys, ([a.data for a in block] for block in arrays)))
    assert [info.key for info in found] == CHAIN.keys[:bad]
    assert all(same(arrays[i], arrays_of(CHAIN.keys[i])) for i in range(bad))
    assert {entry.key for entry in store.entries()} == set(CHAIN.keys) - {CHAIN.keys[bad]}


def test_no_thread_writes_into_buffers_after_the_caller_stopped(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, busy = os.preadv, threading.Semaphore(0)

    def slow(fd: int, views: Any, offset: int) -> int:
        busy.release()
        return read(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    reading = store.read_each(CHAIN.keys, ([a.data for a in block] for block in places()))
    next(reading)
    assert busy.acquire()
    reading.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("snapshots")]


def test_a_block_without_buffers_is_the_callers_fault(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="zip"):
        list(store.read_each(CHAIN.keys, [[a.data for a in block] for block in places()[:3]]))
