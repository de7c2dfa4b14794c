"""Sinks, blocks and tail of a compressed layer, against dense attention over what it says it holds."""

import mlx.core as mx
import numpy as np
import pytest

from kernels import BLOCK_TOKENS, CacheView, encode
from tests.kernels import rounding
from worker.engine import kv_cache
from worker.engine.kv_cache import (
    FIRST_ROOM,
    SINK_TOKENS,
    TAIL_TOKENS,
    CompressedLayer,
    ExactLayer,
    KVCache,
    blocks_end,
    whole_blocks,
    with_room,
)
from worker.engine.prefill import finish
from worker.engine.shapes import LayerShape

HEADS, DIM = 2, 64
SHAPE = LayerShape(HEADS, DIM)


def tokens(n, seed=0):
    mx.random.seed(seed)
    return mx.random.normal((1, HEADS, n, DIM)), mx.random.normal((1, HEADS, n, DIM))


def feed(layer, k, v, step):
    """Pass keys and values through the layer `step` tokens at a time; return all attention outputs."""
    mx.random.seed(7)
    q = mx.random.normal((1, 2 * HEADS, k.shape[2], DIM))
    outs = []
    for a in range(0, k.shape[2], step):
        layer.update_and_fetch(k[:, :, a : a + step], v[:, :, a : a + step])
        outs.append(layer.attend(q[:, :, a : a + step], 0.125))
    return q, mx.concatenate(outs, axis=2)


def held(layer):
    """Everything the layer holds, as dense keys and values."""
    k, v = layer.decoded()
    tail_k, tail_v = layer.tail()
    return mx.concatenate([k, tail_k[0]], axis=1), mx.concatenate([v, tail_v[0]], axis=1)


@pytest.mark.parametrize("step", [16, 17, 512])
@pytest.mark.parametrize("num_tokens", [1, 191, 2048, 2100, 2200, 2700])
def test_a_tail_over_its_limit_settles_into_sinks_and_blocks(num_tokens, step):
    layer = CompressedLayer(SHAPE, mx.float32)
    k, v = tokens(num_tokens)
    feed(layer, k, v, step)
    before = layer._num_tail
    feed(layer, *tokens(1, seed=9), 1)
    assert layer.offset == num_tokens + 1
    assert layer.sinks_k.shape[1] == (SINK_TOKENS if num_tokens > TAIL_TOKENS else 0)
    assert layer._num_tail <= TAIL_TOKENS + 1
    # No more is encoded than must be.
    assert layer._num_tail > min(before, TAIL_TOKENS - BLOCK_TOKENS)
    held_k, held_v = (x[:, :num_tokens] for x in held(layer))
    # The ends are what came in; the middle is what came in within four bits.
    assert mx.allclose(held_k[:, :SINK_TOKENS], k[0, :, :SINK_TOKENS], atol=2e-3)
    newest = layer.sinks_k.shape[1] + layer.num_blocks * BLOCK_TOKENS
    assert mx.array_equal(held_v[:, newest:], v[0, :, newest:])
    assert float(mx.linalg.norm(held_k - k[0]) / mx.linalg.norm(k)) < 0.12


@pytest.mark.parametrize("step", [1, 16, 200])
def test_attention_covers_exactly_the_tokens_so_far(step):
    """Without a prefix the cache is dense up to the tail's limit: ordinary causal attention."""
    layer = CompressedLayer(SHAPE, mx.float32)
    k, v = tokens(700)
    q, out = feed(layer, k, v, step)
    rounding.assert_within_contract(out, rounding.dense_attention(q, k, v, 0.125))


def test_the_tails_buffer_begins_small_and_moves_seldom():
    layer = CompressedLayer(SHAPE, mx.float32)
    k, v = tokens(TAIL_TOKENS)
    rooms = []
    for a in range(0, TAIL_TOKENS, 16):
        layer.update_and_fetch(k[:, :, a : a + 16], v[:, :, a : a + 16])
        finish(layer.arrays())
        rooms.append((layer._tail_k.shape[2], np.array(layer._tail_k, copy=False).ctypes.data))
    assert rooms[0][0] == FIRST_ROOM
    assert rooms[-1][0] < TAIL_TOKENS + BLOCK_TOKENS
    assert len(set(rooms)) <= 5


def test_dropped_tokens_leave_no_trace():
    one, other = (CompressedLayer(SHAPE, mx.float32) for _ in range(2))
    k, v = tokens(300)
    feed(one, k, v, 20)
    feed(one, *tokens(9, seed=4), 9)
    one.drop(9)
    feed(other, k, v, 20)
    assert one.offset == other.offset == 300
    _, expected = feed(other, *tokens(3, seed=5), 3)
    _, out = feed(one, *tokens(3, seed=5), 3)
    assert mx.array_equal(out, expected)


def test_no_more_than_the_tail_can_be_dropped():
    cache = KVCache([SHAPE] * 2, mx.float32)
    for layer in cache.layers:
        feed(layer, *tokens(TAIL_TOKENS + 200), 512)
        feed(layer, *tokens(1), 1)
    num_tail = cache.layers[0]._num_tail
    with pytest.raises(ValueError, match=f"the tail holds {num_tail}"):
        cache.drop(num_tail + 1)
    cache.drop(num_tail)
    assert cache.num_tokens == blocks_end(cache.num_blocks) > 0


@pytest.mark.parametrize("step", [1, 16, 40])
def test_attention_behind_a_prefix_reads_the_decoded_blocks(step):
    k, v = tokens(SINK_TOKENS + 3 * BLOCK_TOKENS)
    tiles = encode(k[0, :, SINK_TOKENS:], v[0, :, SINK_TOKENS:])
    layer = CompressedLayer(SHAPE, mx.float32)
    layer.set_prefix(k[0, :, :SINK_TOKENS], v[0, :, :SINK_TOKENS], with_room(tiles, 1), 3)
    new_k, new_v = tokens(80, seed=1)
    q, out = feed(layer, new_k, new_v, step)
    view = CacheView(layer.sinks_k, layer.sinks_v, tiles, 3, new_k, new_v)
    rounding.assert_within_contract(out, rounding.cached_attention(q, view, 0.125))


def test_rewinding_gives_the_same_attention_again():
    k, v = tokens(SINK_TOKENS + 2 * BLOCK_TOKENS)
    layer = CompressedLayer(SHAPE, mx.float32)
    tiles = encode(k[0, :, SINK_TOKENS:], v[0, :, SINK_TOKENS:])
    layer.set_prefix(k[0, :, :SINK_TOKENS], v[0, :, :SINK_TOKENS], tiles, 2)
    new_k, new_v = tokens(2300, seed=3)
    _, first = feed(layer, new_k, new_v, 30)
    assert layer.num_blocks == 4
    layer.rewind(2)
    assert layer.offset == blocks_end(2)
    _, second = feed(layer, new_k, new_v, 30)
    assert mx.array_equal(first, second)


def test_rewinding_to_nothing_forgets_the_sinks():
    layer = CompressedLayer(SHAPE, mx.float32)
    feed(layer, *tokens(2400), 800)
    feed(layer, *tokens(1), 1)
    assert layer.sinks_k.shape[1]
    layer.rewind(0)
    assert layer.offset == 0


def test_a_sink_is_rounded_as_it_is_stored():
    layer = CompressedLayer(SHAPE, mx.float32)
    k, v = tokens(2100)
    feed(layer, k, v, 1050)
    feed(layer, *tokens(1), 1)
    assert mx.array_equal(layer.sinks_k, k[0, :, :64].astype(mx.float16).astype(mx.float32))


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (64, 0), (191, 0), (192, 1), (319, 1), (320, 2)]
)
def test_blocks_begin_behind_the_sinks(num_tokens, num_blocks):
    assert whole_blocks(num_tokens) == num_blocks
    assert blocks_end(num_blocks) <= num_tokens


@pytest.mark.parametrize("by_token", [True, False])
def test_an_exact_layer_attends_to_all_so_far_and_never_moves_its_buffer(monkeypatch, by_token):
    """A slice that outlived its step would make each update copy what may be a whole document."""
    monkeypatch.setattr(ExactLayer, "on_cuda", by_token)
    monkeypatch.setattr(kv_cache, "has_fused_prefill", lambda head_dim, dtype: True)
    layer = ExactLayer(300, SHAPE, mx.float32)
    k, v = tokens(300)
    q, places = mx.random.normal((1, 3 * HEADS, 300, DIM)), set()
    exact = rounding.dense_attention(q, k, v, 0.125)
    for a in range(0, 300, 100):
        handle, _ = layer.update_and_fetch(k[:, :, a : a + 100], v[:, :, a : a + 100])
        out = handle.owner.attend(q[:, :, a : a + 100], 0.125, None)
        finish(out, layer.arrays())
        part = rounding.Exact(*(x[:, :, a : a + 100] for x in exact))
        rounding.assert_within_contract(out, part)
        places.add(np.array(layer.arrays()[0], copy=False).ctypes.data)
    assert layer.offset == 300
    assert len(places) == 1
    assert all(mx.array_equal(held, given) for held, given in zip(layer.held(), (k, v), strict=True))


@pytest.mark.parametrize("layer", [ExactLayer(40, SHAPE, mx.float32), CompressedLayer(SHAPE, mx.float32)])
def test_sink_logits_take_weight_in_dense_attention(layer):
    k, v = tokens(40)
    q, sinks = mx.random.normal((1, 2 * HEADS, 40, DIM)), mx.array([0.5, -2.0, 30.0, 3.0])
    handle, _ = layer.update_and_fetch(k, v)
    out = handle.owner.attend(q, 0.125, sinks)
    logits = rounding.wide(sinks).reshape(1, HEADS, 2, 1, 1)
    rounding.assert_within_contract(out, rounding.dense_attention(q, k, v, 0.125, sinks=logits))
