"""Sinks, blocks and tail of a compressed layer, against dense attention over what it says it holds."""

import mlx.core as mx
import numpy as np
import pytest

from kernels import BLOCK_TOKENS, decode, encode
from worker.engine.kv_cache import (
    SINK_TOKENS,
    CompressedLayer,
    ExactLayer,
    blocks_end,
    whole_blocks,
    with_room,
)

HEADS, DIM = 2, 64


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
    tail_k, tail_v = layer._tail()
    return mx.concatenate([k, tail_k[0]], axis=1), mx.concatenate([v, tail_v[0]], axis=1)


@pytest.mark.parametrize("step", [1, 5, 16, 17, 100, 512])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 191, 192, 193, 460])
def test_tokens_settle_into_sinks_blocks_and_tail(num_tokens, step):
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    k, v = tokens(num_tokens)
    feed(layer, k, v, step)
    assert layer.offset == num_tokens
    assert layer.sinks_k.shape[1] == (SINK_TOKENS if num_tokens >= SINK_TOKENS else 0)
    assert layer.num_blocks == whole_blocks(num_tokens)
    assert layer._num_tail < BLOCK_TOKENS
    held_k, held_v = held(layer)
    assert held_k.shape == (HEADS, num_tokens, DIM)
    # The ends are what came in; the middle is what came in within four bits.
    assert mx.allclose(held_k[:, :SINK_TOKENS], k[0, :, :SINK_TOKENS], atol=2e-3)
    newest = blocks_end(layer.num_blocks)
    assert mx.allclose(held_v[:, newest:], v[0, :, newest:], atol=2e-3)
    assert float(mx.linalg.norm(held_k - k[0]) / mx.linalg.norm(k)) < 0.12


@pytest.mark.parametrize("step", [1, 16, 200])
def test_attention_covers_exactly_the_tokens_so_far(step):
    """Before any block is made the cache is dense, so attention is ordinary causal attention."""
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    k, v = tokens(190)
    q, out = feed(layer, k, v, step)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")
    assert mx.allclose(out, expected, atol=2e-3)


@pytest.mark.parametrize("step", [1, 16, 40])
def test_attention_behind_a_prefix_reads_the_decoded_blocks(step):
    k, v = tokens(SINK_TOKENS + 3 * BLOCK_TOKENS)
    tiles = encode(k[0, :, SINK_TOKENS:], v[0, :, SINK_TOKENS:])
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    layer.set_prefix(k[0, :, :SINK_TOKENS], v[0, :, :SINK_TOKENS], with_room(tiles, 1), 3)
    new_k, new_v = tokens(80, seed=1)
    q, out = feed(layer, new_k, new_v, step)
    seen = mx.concatenate([layer.sinks_k, decode(tiles, DIM)[0]], axis=1)[None]
    seen_v = mx.concatenate([layer.sinks_v, decode(tiles, DIM)[1]], axis=1)[None]
    expected = mx.fast.scaled_dot_product_attention(
        q,
        mx.concatenate([seen, new_k], axis=2),
        mx.concatenate([seen_v, new_v], axis=2),
        scale=0.125,
        mask="causal",
    )
    assert mx.allclose(out, expected, atol=1e-4)


def test_rewinding_gives_the_same_attention_again():
    k, v = tokens(SINK_TOKENS + 2 * BLOCK_TOKENS)
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    tiles = encode(k[0, :, SINK_TOKENS:], v[0, :, SINK_TOKENS:])
    layer.set_prefix(k[0, :, :SINK_TOKENS], v[0, :, :SINK_TOKENS], tiles, 2)
    new_k, new_v = tokens(300, seed=3)
    _, first = feed(layer, new_k, new_v, 30)
    assert layer.num_blocks == 4
    layer.rewind(2)
    assert layer.offset == blocks_end(2)
    _, second = feed(layer, new_k, new_v, 30)
    assert mx.array_equal(first, second)


def test_rewinding_to_nothing_forgets_the_sinks():
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    k, v = tokens(200)
    feed(layer, k, v, 50)
    layer.rewind(0)
    assert layer.offset == 0


def test_a_sink_is_rounded_as_it_is_stored():
    layer = CompressedLayer(HEADS, DIM, mx.float32)
    k, v = tokens(64)
    feed(layer, k, v, 64)
    assert mx.array_equal(layer.sinks_k, k[0].astype(mx.float16).astype(mx.float32))


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (64, 0), (191, 0), (192, 1), (319, 1), (320, 2)]
)
def test_blocks_begin_behind_the_sinks(num_tokens, num_blocks):
    assert whole_blocks(num_tokens) == num_blocks
    assert blocks_end(num_blocks) <= num_tokens


def test_an_exact_layer_attends_to_all_so_far_and_never_moves_its_buffer():
    """A slice that outlived its step would make each update copy what may be a whole document."""
    layer = ExactLayer(300, HEADS, DIM, mx.float32)
    k, v = tokens(300)
    q, places = mx.random.normal((1, 3 * HEADS, 300, DIM)), set()
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")
    for a in range(0, 300, 100):
        handle, _ = layer.update_and_fetch(k[:, :, a : a + 100], v[:, :, a : a + 100])
        out = handle.owner.attend(q[:, :, a : a + 100], 0.125, None)
        mx.eval(out, layer.keys, layer.values)
        assert mx.allclose(out, expected[:, :, a : a + 100], atol=1e-5)
        places.add(np.array(layer.keys, copy=False).ctypes.data)
    assert layer.offset == 300
    assert len(places) == 1


@pytest.mark.parametrize(
    "layer", [ExactLayer(40, HEADS, DIM, mx.float32), CompressedLayer(HEADS, DIM, mx.float32)]
)
def test_sink_logits_take_weight_in_dense_attention(layer):
    k, v = tokens(40)
    q, sinks = mx.random.normal((1, 2 * HEADS, 40, DIM)), mx.array([0.5, -2.0, 30.0, 3.0])
    handle, _ = layer.update_and_fetch(k, v)
    out = handle.owner.attend(q, 0.125, sinks)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", sinks=sinks)
    assert mx.allclose(out, expected, atol=1e-5)
