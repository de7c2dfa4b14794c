from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from stored_blocks import get, make_chain, path_of, put, which

from cache_store import Section, SnapshotStore, attach, attached
from cache_store.key import attached_key

CHAIN = make_chain(2)
KEY = CHAIN.keys[1]
LOGITS = np.arange(32, dtype=np.float32)
SECTIONS = [Section("logits", "float32", (32,), LOGITS.data)]


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    put(store, CHAIN, 0, model="m", tenant="anna")
    put(store, CHAIN, 1, exact=False, model="m", tenant="anna")
    return store


def test_an_attachment_is_read_apart_from_its_block(store: SnapshotStore) -> None:
    assert attach(store, KEY, "self-check", SECTIONS, {"position": 319})
    found = attached(store, KEY, "self-check")
    assert found is not None
    info, (data,) = found
    assert bytes(data) == LOGITS.tobytes()
    assert info.meta == {"position": 319, "model": "m", "tenant": "anna", "attached": "self-check"}
    assert attached(store, KEY, "other") is None
    assert attached(store, CHAIN.keys[0], "self-check") is None
    assert which(get(store, KEY), KEY) == "continued"
    assert store.match(CHAIN.keys, CHAIN.blocks) == 2


def test_what_was_attached_to_a_continued_block_is_a_miss_once_it_is_exact(store: SnapshotStore) -> None:
    assert attach(store, KEY, "self-check", SECTIONS, {})
    put(store, CHAIN, 1, exact=True)
    assert attached(store, KEY, "self-check") is None
    other = np.ones(32, np.float32)
    assert attach(store, KEY, "self-check", [Section("logits", "float32", (32,), other.data)], {})
    found = attached(store, KEY, "self-check")
    assert found is not None
    assert bytes(found[1][0]) == other.tobytes()


def test_a_damaged_attachment_is_a_miss_and_its_block_is_not(store: SnapshotStore, tmp_path: Path) -> None:
    assert attach(store, KEY, "self-check", SECTIONS, {})
    path = path_of(tmp_path, attached_key(KEY, "self-check"))
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    assert attached(store, KEY, "self-check") is None
    assert not path.exists()
    assert store.match(CHAIN.keys, CHAIN.blocks) == 2
    assert attach(store, KEY, "self-check", SECTIONS, {})
    assert attached(store, KEY, "self-check") is not None


def test_nothing_is_attached_to_a_block_that_is_not_stored(store: SnapshotStore) -> None:
    assert not attach(store, make_chain(1, 9).keys[0], "self-check", SECTIONS, {})
    assert attach(store, KEY, "self-check", SECTIONS, {})
    store.remove(KEY)
    assert attached(store, KEY, "self-check") is None


def test_an_attachment_goes_before_its_block(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3 * 8192, 0)
    put(store, CHAIN, 0)
    assert attach(store, CHAIN.keys[0], "self-check", SECTIONS, {"prefill_s": 1e9})
    for seed in (1, 2):
        assert put(store, make_chain(1, seed), 0, prefill_s=1e12)
    assert attached(store, CHAIN.keys[0], "self-check") is None
    assert store.match(CHAIN.keys[:1], CHAIN.blocks[:1]) == 1


def test_reading_an_attachment_keeps_it_as_its_block_is_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 4 * 8192, 0, touch_every_s=0)
    put(store, CHAIN, 0)
    assert attach(store, CHAIN.keys[0], "windows", SECTIONS, {})
    stranger = make_chain(1, 1)
    put(store, stranger, 0)
    for path in tmp_path.rglob("*.llkv"):
        os.utime(path, ns=(10**18, 10**18))
    again = SnapshotStore(tmp_path, 4 * 8192, 0, touch_every_s=0)
    assert attached(again, CHAIN.keys[0], "windows") is not None
    for seed in (2, 3):
        assert put(again, make_chain(1, seed), 0)
    assert again.match(stranger.keys, stranger.blocks) == 0
    assert attached(again, CHAIN.keys[0], "windows") is not None
