"""A prefix through the store and back, without a model."""

import mlx.core as mx
import numpy as np
import pytest

from cache_store import SnapshotStore
from kernels import encode
from worker.engine import snapshots
from worker.engine.kv_cache import SINK_TOKENS, KVCache, blocks_end, with_room
from worker.engine.report import Silent
from worker.engine.shapes import LayerShape
from worker.engine.snapshots import MOVED_TOGETHER, Prefix, num_common, num_restorable, restore, save

SHAPES = [LayerShape(2, 64), LayerShape(1, 128, format="k8v4"), LayerShape(2, 64)]
SLIDING = [LayerShape(2, 64, window=300), LayerShape(1, 128), LayerShape(1, 64, window=40)]


def filled(num_blocks, shapes=SHAPES):
    mx.random.seed(2)
    cache = KVCache(shapes, mx.float32)
    for window in cache.windows:
        kept = (window.shape.num_kv_heads, window.num_kept(blocks_end(num_blocks)), window.shape.head_dim)
        window.set_prefix(mx.random.normal(kept), mx.random.normal(kept), blocks_end(num_blocks))
    for layer in cache.compressed:
        heads, dim, format = layer.shape.num_kv_heads, layer.shape.head_dim, layer.shape.format
        k, v = (mx.random.normal((heads, blocks_end(num_blocks), dim)) for _ in range(2))
        tiles = encode(k[:, SINK_TOKENS:], v[:, SINK_TOKENS:], format)
        layer.set_prefix(k[:, :SINK_TOKENS], v[:, :SINK_TOKENS], with_room(tiles, 2), num_blocks)
    mx.eval(cache.arrays())
    return cache


def prefix_of(num_blocks, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 1000, blocks_end(num_blocks)).astype(np.uint32)
    return Prefix("fingerprint", tokens)


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path, 100_000_000, min_free_bytes=0)


@pytest.mark.parametrize("num_blocks", [1, MOVED_TOGETHER, 2 * MOVED_TOGETHER + 3])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_saved_comes_back_bit_for_bit(store, num_blocks, first, in_place, monkeypatch):
    monkeypatch.setattr(snapshots, "reads_host_memory", lambda: in_place)
    cache, prefix = filled(num_blocks), prefix_of(num_blocks)
    if first:
        save(store, Prefix("fingerprint", prefix.tokens[: blocks_end(first)]), cache, 0, True, "m")
    assert save(store, prefix, cache, first, True, "m") == num_blocks - first
    assert store.match(prefix.keys, prefix.blocks) == num_blocks
    again = KVCache(SHAPES, mx.float32)
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


def stored(store, prefix, shapes=SLIDING, exact=True):
    cache = filled(prefix.num_blocks, shapes)
    assert save(store, prefix, cache, 0, exact, "m") == prefix.num_blocks
    return cache


def test_windows_come_back_with_the_blocks(store):
    prefix = prefix_of(4)
    cache = stored(store, prefix)
    again = KVCache(SLIDING, mx.float32)
    assert num_restorable(store, prefix, with_windows=True) == 4
    assert restore(store, prefix, 4, again, 2, Silent()) == (4, True)
    assert again.num_tokens == blocks_end(4)
    for old, new in zip(cache.windows, again.windows, strict=True):
        assert new.offset == blocks_end(4)
        assert mx.array_equal(old.prefix_k, new.prefix_k)
        assert mx.array_equal(old.prefix_v, new.prefix_v)


def test_a_prefix_is_restored_up_to_the_longest_block_with_windows(store):
    long = prefix_of(6)
    short, middle = (Prefix("fingerprint", long.tokens[: blocks_end(n)]) for n in (2, 4))
    stored(store, short)
    stored(store, long)
    assert num_restorable(store, middle, with_windows=True) == 2
    assert num_restorable(store, middle, with_windows=False) == 4
    assert num_restorable(store, long, with_windows=True) == 6


def test_windows_are_added_where_the_blocks_are_there_already(store):
    long = prefix_of(6)
    middle = Prefix("fingerprint", long.tokens[: blocks_end(4)])
    stored(store, long)
    num_before = len(store.entries())
    cache = stored(store, middle)
    assert len(store.entries()) == num_before + 1
    again = KVCache(SLIDING, mx.float32)
    assert restore(store, middle, num_restorable(store, middle, True), again, 0, Silent()) == (4, True)
    assert mx.array_equal(again.windows[0].prefix_v, cache.windows[0].prefix_v)


def test_windows_of_a_continued_prefix_are_not_joined_to_exact_blocks(store):
    long = prefix_of(6)
    middle = Prefix("fingerprint", long.tokens[: blocks_end(4)])
    stored(store, long, exact=True)
    stored(store, middle, exact=False)
    assert num_restorable(store, middle, with_windows=True) == 0


def test_damaged_windows_are_a_miss(store):
    prefix = prefix_of(3)
    stored(store, prefix)
    entry = next(entry for entry in store.entries() if entry.attached)
    path = next(store.folder.rglob(f"{entry.key.hex}*"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 0x10
    path.write_bytes(content)
    again = KVCache(SLIDING, mx.float32)
    assert restore(store, prefix, 3, again, 0, Silent()) == (0, True)
    assert again.num_tokens == 0
    assert num_restorable(store, prefix, with_windows=True) == 0
