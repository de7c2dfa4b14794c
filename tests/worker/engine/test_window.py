"""A layer with a window, against attention with mlx_lm's own mask over everything that it was given."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from tests.kernels import rounding
from worker.engine.kv_cache import KVCache, blocks_end
from worker.engine.shapes import LayerShape
from worker.engine.window import SPARE_TOKENS, WindowLayer

HEADS, DIM, WINDOW = 2, 64, 48
SHAPE = LayerShape(HEADS, DIM, window=WINDOW)


def tokens(n, seed=0):
    mx.random.seed(seed)
    return [mx.random.normal((1, heads, n, DIM)) for heads in (2 * HEADS, HEADS, HEADS)]


def feed(layer, q, k, v, step, sinks=None):
    """Pass tokens through the layer `step` at a time; return all attention outputs."""
    outs = []
    for a in range(0, k.shape[2], step):
        handle, _ = layer.update_and_fetch(k[:, :, a : a + step], v[:, :, a : a + step])
        outs.append(handle.owner.attend(q[:, :, a : a + step], 0.125, sinks))
    return mx.concatenate(outs, axis=2)


def expected(q, k, v, sinks=None):
    visible = np.array(create_causal_mask(k.shape[2], window_size=WINDOW))
    logits = None if sinks is None else rounding.wide(sinks).reshape(1, HEADS, 2, 1, 1)
    return rounding.dense_attention(q, k, v, 0.125, visible, sinks=logits)


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -2.0, 30.0, 3.0])])
@pytest.mark.parametrize("step", [1, 5, 16, 17, WINDOW, 200])
@pytest.mark.parametrize("num_tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 430])
def test_a_query_sees_its_own_token_and_those_before_it_in_the_window(num_tokens, step, sinks):
    layer = WindowLayer(SHAPE, mx.float32)
    q, k, v = tokens(num_tokens)
    rounding.assert_within_contract(feed(layer, q, k, v, step, sinks), expected(q, k, v, sinks))
    assert layer.offset == num_tokens


@pytest.mark.parametrize("step", [1, 16, 64])
def test_it_holds_little_more_than_its_window(step):
    layer = WindowLayer(SHAPE, mx.float32)
    feed(layer, *tokens(1000), step)
    assert layer.tail()[0].shape[2] < WINDOW + SPARE_TOKENS
    feed(layer, *tokens(1), 1)
    assert all(array.shape[-2] < WINDOW + 2 * SPARE_TOKENS for array in layer.arrays())


@pytest.mark.parametrize("num_tokens", [20, 300])
def test_a_prefix_ends_rounded_as_it_is_stored_and_is_gone_back_to(num_tokens):
    layer = WindowLayer(SHAPE, mx.float32)
    q, k, v = tokens(num_tokens)
    feed(layer, q, k, v, 50)
    layer.end_prefix()
    first = min(WINDOW - 1, num_tokens)
    assert mx.array_equal(layer.prefix_k, k[0, :, -first:].astype(mx.float16).astype(mx.float32))
    after = tokens(200, seed=1)
    one = feed(layer, *after, 7)
    layer.rewind()
    assert layer.offset == num_tokens
    assert mx.array_equal(feed(layer, *after, 7), one)
    restored = WindowLayer(SHAPE, mx.float32)
    restored.set_prefix(layer.prefix_k, layer.prefix_v, num_tokens)
    assert mx.array_equal(feed(restored, *after, 7), one)


def test_the_window_of_a_prefix_has_all_that_the_next_token_sees():
    layer = WindowLayer(SHAPE, mx.float32)
    few = mx.zeros((HEADS, 20, DIM))
    with pytest.raises(ValueError, match="expected 47 of them"):
        layer.set_prefix(few, few, 300)


@pytest.mark.parametrize("num_before", [10, 300, WINDOW + SPARE_TOKENS - 3])
def test_dropped_drafts_leave_no_trace(num_before):
    """Also where the drafts moved the window."""
    layer, q_k_v = WindowLayer(SHAPE, mx.float32), tokens(num_before + 3)
    before, after = ([x[:, :, part] for x in q_k_v] for part in (slice(num_before), slice(num_before, None)))
    feed(layer, *before, 10)
    feed(layer, *tokens(16, seed=4), 16)
    layer.drop(16)
    out = feed(layer, *after, 3)
    rounding.assert_within_contract(out, rounding.Exact(*(x[:, :, num_before:] for x in expected(*q_k_v))))


def test_no_more_can_be_dropped_than_leaves_a_window():
    layer = WindowLayer(SHAPE, mx.float32)
    feed(layer, *tokens(600), 1)
    with pytest.raises(ValueError, match="rewind to the prefix"):
        layer.drop(400)


def test_a_cache_goes_back_only_to_where_its_windows_are():
    cache = KVCache([SHAPE, LayerShape(HEADS, DIM)], mx.float32)
    nothing = mx.zeros((HEADS, WINDOW - 1, DIM))
    cache.windows[0].set_prefix(nothing, nothing, blocks_end(3))
    assert cache.can_rewind(3)
    assert not cache.can_rewind(2)
    with pytest.raises(ValueError, match="those after 448 tokens"):
        cache.rewind(2)
    cache.rewind(0)
    assert cache.windows[0].offset == 0


def test_a_layer_may_read_anothers_keys_and_values():
    cache = KVCache([LayerShape(HEADS, DIM), LayerShape(HEADS, DIM, source=0)], mx.float32)
    q, k, v = tokens(30)
    own, _ = cache.layers[0].update_and_fetch(k, v)
    borrowed, _ = cache.layers[1].handles(q)
    assert cache.layers[1].offset(30) == 0
    assert mx.array_equal(borrowed.owner.attend(q, 0.125, None), own.owner.attend(q, 0.125, None))
    assert len(cache.arrays()) == len(cache.compressed[0].arrays())
