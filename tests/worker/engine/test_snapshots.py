"""A prefix through the store and back, without a model."""

import mlx.core as mx
import numpy as np
import pytest

from cache_store import SnapshotStore
from kernels import encode
from worker.engine.kv_cache import SINK_TOKENS, KVCache, blocks_end, with_room
from worker.engine.report import Silent
from worker.engine.snapshots import SAVED_TOGETHER, Prefix, num_common, restore, save

LAYERS, HEADS, DIM = 3, 2, 64


def filled(num_blocks):
    mx.random.seed(2)
    cache = KVCache(LAYERS, HEADS, DIM, mx.float32)
    for layer in cache.layers:
        k, v = (mx.random.normal((HEADS, blocks_end(num_blocks), DIM)) for _ in range(2))
        tiles = encode(k[:, SINK_TOKENS:], v[:, SINK_TOKENS:])
        layer.set_prefix(k[:, :SINK_TOKENS], v[:, :SINK_TOKENS], with_room(tiles, 2), num_blocks)
    mx.eval(cache.arrays())
    return cache


def prefix_of(num_blocks, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 1000, blocks_end(num_blocks)).astype(np.uint32)
    return Prefix("fingerprint", tokens)


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path, 100_000_000, min_free_bytes=0)


@pytest.mark.parametrize("num_blocks", [1, SAVED_TOGETHER, 2 * SAVED_TOGETHER + 3])
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_saved_comes_back_bit_for_bit(store, num_blocks, first):
    cache, prefix = filled(num_blocks), prefix_of(num_blocks)
    if first:
        save(store, Prefix("fingerprint", prefix.tokens[: blocks_end(first)]), cache, 0, True, "m")
    assert save(store, prefix, cache, first, True, "m") == num_blocks - first
    assert store.match(prefix.keys, prefix.blocks) == num_blocks
    again = KVCache(LAYERS, HEADS, DIM, mx.float32)
    assert restore(store, prefix, num_blocks, again, 2, Silent()) == (num_blocks, True)
    for old, new in zip(cache.layers, again.layers, strict=True):
        assert mx.array_equal(old.tiles[:num_blocks], new.tiles[:num_blocks])
        assert mx.array_equal(old.sinks_k, new.sinks_k)
        assert mx.array_equal(old.sinks_v, new.sinks_v)


def test_a_store_without_room_keeps_a_whole_beginning(tmp_path):
    cache, prefix = filled(6), prefix_of(6)
    small = SnapshotStore(tmp_path, 300_000, min_free_bytes=0)
    num_stored = save(small, prefix, cache, 0, True, "m")
    assert 0 < num_stored < 6
    assert small.match(prefix.keys, prefix.blocks) == num_stored


def test_chains_share_what_they_have_in_common():
    one, other = prefix_of(4), prefix_of(4, seed=1)
    longer = Prefix("fingerprint", np.concatenate([one.tokens, other.tokens]))
    assert num_common(one.keys, longer.keys) == 4
    assert num_common(one.keys, other.keys) == 0
    assert num_common(Prefix("another", one.tokens).keys, one.keys) == 0
