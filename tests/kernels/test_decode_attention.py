"""Decode attention as this machine computes it, against the exact result on the same codes."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import decode_in_float64, make_view, queries

import kernels
from kernels import BLOCK_TOKENS, FORMATS, CacheView, from_canonical, reference, unfused
from kernels.codec import decode, encode
from tests.kernels import rounding
from tests.kernels.rounding import UNITS


def decode_attention(q, view, scale, sinks=None):
    """The public function on a canonical view: the tiles are put into the order that this device reads."""
    ordered = replace(view, tiles=from_canonical(view.tiles, view.tail_k.shape[-1], view.format))
    return kernels.decode_attention(q, ordered, scale, sinks)


def assert_close(q, view, scale, sinks=None):
    ours = decode_attention(q, view, scale, sinks)
    assert ours.dtype == q.dtype
    assert ours.shape == q.shape
    rounding.assert_within_contract(ours, rounding.cached_attention(q, view, scale, sinks, UNITS[q.dtype]))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("num_queries", [1, 2, 16])
def test_it_agrees_with_the_reference(head_dim, group, num_queries):
    view = make_view(3, head_dim=head_dim, spare=2)
    assert_close(queries(2 * group, num_queries, head_dim), view, head_dim**-0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_format(format, head_dim, dtype):
    view = make_view(3, head_dim=head_dim, spare=2, dtype=dtype, batch=2, format=format)
    assert_close(queries(8, 3, head_dim, dtype, batch=2), view, head_dim**-0.5)


@pytest.mark.parametrize("num_blocks", [0, 1, 257])
def test_any_number_of_blocks(num_blocks):
    """257 blocks are 32,896 tokens, past what a 16-bit index reaches."""
    assert_close(queries(4, 1, 64), make_view(num_blocks, num_kv_heads=1), 0.125)


@pytest.mark.parametrize(("num_sinks", "num_tail"), [(0, 1), (64, 1), (1, 127), (64, 143)])
def test_any_length_of_the_dense_ends(num_sinks, num_tail):
    assert_close(queries(4, 1, 64), make_view(2, num_sinks=num_sinks, num_tail=num_tail), 0.125)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_queries(dtype):
    assert_close(queries(4, 4, 128, dtype), make_view(2, head_dim=128, dtype=dtype), 128**-0.5)


@pytest.mark.parametrize("size", [1e-3, 100.0, 1e4])
def test_extreme_scores(size):
    assert_close(queries(4, 1, 64, size=size), make_view(2), 1.0)


def test_equal_keys_average_the_values():
    mx.random.seed(1)
    k, v = mx.ones((1, BLOCK_TOKENS, 64)), mx.random.normal((1, BLOCK_TOKENS, 64))
    empty = mx.zeros((1, 0, 64))
    tiles = encode(k, v)
    view = CacheView(empty, empty, tiles, 1, k[None, :, :1], mx.zeros((1, 1, 1, 64)))
    q = queries(2, 1, 64)
    means = decode_in_float64(tiles, 64)[1].sum(axis=1) / (BLOCK_TOKENS + 1)
    assert np.allclose(rounding.cached_attention(q, view, 0.125).truth[0, :, 0], means, rtol=0, atol=1e-14)
    assert_close(q, view, 0.125)


def test_sink_logits_take_weight_and_give_nothing():
    view = make_view(2)
    q = queries(4, 2, 64)
    assert_close(q, view, 0.125, mx.array([0.5, -2.0, 30.0, 3.0]))
    assert mx.allclose(decode_attention(q, view, 0.125, mx.full((4,), 500.0)), mx.zeros_like(q))


def test_a_query_does_not_see_the_tokens_after_it():
    view = make_view(1, num_tail=8)
    q = queries(2, 4, 64)
    changed = mx.concatenate([view.tail_k[:, :, :5], 9 * mx.ones((1, 2, 3, 64))], axis=2)
    later = CacheView(view.sinks_k, view.sinks_v, view.tiles, 1, changed, view.tail_v)
    a, b = decode_attention(q, view, 0.125), decode_attention(q, later, 0.125)
    assert mx.array_equal(a[:, :, 0], b[:, :, 0])
    assert not mx.allclose(a[:, :, 1], b[:, :, 1])


def test_the_reference_is_ordinary_attention_over_the_decoded_cache():
    view = make_view(2, num_kv_heads=2, num_tail=5)
    q = queries(6, 3, 64)
    k, v = decode(view.tiles, 64)
    k = mx.concatenate([view.sinks_k[None], k[None], view.tail_k], axis=2)
    v = mx.concatenate([view.sinks_v[None], v[None], view.tail_v], axis=2)
    exact = rounding.dense_attention(q, k, v, 0.125)
    for found in (
        reference.decode_attention(q, view, 0.125),
        mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"),
    ):
        rounding.assert_within_contract(found, exact)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_rows_share_the_blocks_and_have_a_tail_each(num_queries):
    """A row of the batch gives what it gives alone, whatever stands in the padding of its tail."""
    view = make_view(2, num_tail=24, batch=3)
    q = queries(6, num_queries, 64, batch=3)
    lengths = mx.array([24, 3, 11], dtype=mx.int32)
    padding = mx.arange(24)[None, None, :, None] >= lengths[:, None, None, None]
    tail_k, tail_v = mx.where(padding, mx.nan, view.tail_k), mx.where(padding, mx.nan, view.tail_v)
    together = CacheView(view.sinks_k, view.sinks_v, view.tiles, 2, tail_k, tail_v, lengths)
    assert_close(q, together, 0.125)
    out = decode_attention(q, together, 0.125)
    for row, length in enumerate(lengths.tolist()):
        k, v = (t[row : row + 1, :, :length] for t in (view.tail_k, view.tail_v))
        alone = CacheView(view.sinks_k, view.sinks_v, view.tiles, 2, k, v)
        exact = rounding.cached_attention(q[row : row + 1], alone, 0.125)
        rounding.assert_within_contract(out[row : row + 1], exact)


@pytest.mark.parametrize("num_queries", [1, 5])
def test_a_window_hides_what_is_older(num_queries):
    empty = mx.zeros((2, 0, 64))
    tail = make_view(0, num_tail=40)
    view = CacheView(empty, empty, tail.tiles, 0, tail.tail_k, tail.tail_v, window=8)
    q = queries(4, num_queries, 64)
    assert_close(q, view, 0.125)
    newest = CacheView(empty, empty, tail.tiles, 0, tail.tail_k[:, :, -8:], tail.tail_v[:, :, -8:])
    last = q[:, :, -1:]
    out = decode_attention(q, view, 0.125)[:, :, -1:]
    rounding.assert_within_contract(out, rounding.cached_attention(last, newest, 0.125))


def test_a_window_over_blocks_is_refused():
    view = make_view(1)
    windowed = CacheView(view.sinks_k, view.sinks_v, view.tiles, 1, view.tail_k, view.tail_v, window=8)
    with pytest.raises(ValueError, match="window 8"):
        decode_attention(queries(2, 1, 64), windowed, 0.125)


@pytest.mark.parametrize(
    ("q_shape", "message"),
    [
        ((1, 3, 1, 64), "do not fit"),
        ((2, 4, 1, 64), "do not fit"),
        ((1, 4, 1, 128), "do not fit"),
        ((1, 4, 17, 64), "takes 1 to 16"),
        ((1, 4, 9, 64), "tail holds"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q_shape, message):
    with pytest.raises(ValueError, match=message):
        decode_attention(mx.zeros(q_shape), make_view(1, num_tail=8), 0.125)


def test_more_blocks_than_tiles_are_refused():
    view = make_view(1)
    wrong = CacheView(view.sinks_k, view.sinks_v, view.tiles, 2, view.tail_k, view.tail_v)
    with pytest.raises(ValueError, match="num_blocks 2"):
        decode_attention(queries(2, 1, 64), wrong, 0.125)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("group", "num_queries", "batch"), [(1, 1, 1), (3, 2, 1), (2, 5, 3)])
def test_plain_operations_agree_with_the_reference(head_dim, group, num_queries, batch):
    """The path without kernels of our own, whatever backend this machine has."""
    view = replace(
        make_view(3, head_dim=head_dim, spare=2, batch=batch),
        tail_lengths=mx.array([20, 7, 11][:batch], dtype=mx.int32),
    )
    q = queries(2 * group, num_queries, head_dim, batch=batch)
    for logits in (None, mx.arange(2.0 * group)):
        exact = rounding.cached_attention(q, view, head_dim**-0.5, logits)
        for module in (unfused, reference):
            out = module.decode_attention(q, view, head_dim**-0.5, logits)
            rounding.assert_within_contract(out, exact, module.__name__)


def test_head_sizes_without_an_mlx_group_take_the_reference():
    assert not unfused.supports(80)
    assert unfused.supports(128)
