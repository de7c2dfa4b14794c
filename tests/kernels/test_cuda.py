"""The CUDA kernels against float32 on the same codes, and their codec against the readable one.

Skipped where MLX has no CUDA device.
"""

import os
from dataclasses import replace

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # the float32 reference must be float32

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import make_view, queries

from kernels import BLOCK_TOKENS, FORMATS, CacheView, codec, cuda, reference
from kernels.cuda.device import Device
from kernels.formats import TileLayout

pytestmark = pytest.mark.skipif(not cuda.available(), reason="MLX has no CUDA device here")

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256, 512]
DTYPES = [mx.float16, mx.bfloat16, mx.float32]
TILES = [
    (format, d) for format in FORMATS for d in HEAD_DIMS if format != "affine4" or d not in (80, 96, 112)
]
"""Every format with the head sizes that have a tile of it."""
SAME_SCALES = {4: 0.999, 8: 0.99}
"""The share of scales that rounding leaves alone, by bits; of 8 it is that of the largest value."""


def prepared(view):
    """The same cache with its tiles in device order."""
    return replace(view, tiles=cuda.to_device_order(view.tiles, view.tail_k.shape[-1], view.format))


def naive(q, view, scale, sinks=None):
    """Attention as one would write it, every step in q's dtype; not finite where that overflows."""
    batch, _, num_queries, head_dim = q.shape
    k, v = codec.decode(view.tiles[: view.num_blocks], head_dim, q.dtype, view.format)

    def tokens(sinks, blocks, tail):
        shared = mx.concatenate([sinks.astype(q.dtype), blocks], axis=1)
        shared = mx.broadcast_to(shared, (batch, *shared.shape))
        return mx.concatenate([shared, tail.astype(q.dtype)], axis=2)[:, :, None]

    k, v = tokens(view.sinks_k, k, view.tail_k), tokens(view.sinks_v, v, view.tail_v)
    rows = q.reshape(batch, k.shape[1], -1, num_queries, head_dim)
    scores = scale * (rows @ k.swapaxes(-1, -2))
    own = k.shape[3] - num_queries + mx.arange(num_queries)[:, None]
    scores = mx.where(mx.arange(k.shape[3]) <= own, scores, -mx.inf)
    if sinks is not None:
        logits = mx.broadcast_to(sinks.reshape(1, k.shape[1], -1, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, logits.astype(q.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[3]]
    return (weights @ v).reshape(q.shape).astype(mx.float32)


def assert_close(q, view, scale, sinks=None, largest_logit=0.0):
    """Within twice the error of a naive computation of q's dtype, and never above 2e-5 in float32.

    Where the naive one overflows, or is exact by luck, within a few roundings of q's dtype. Large logits
    loosen the bound of float32, which rounds them by 2^-24 of them and weights by as much."""
    truth = reference.decode_attention(q, view, scale, sinks)
    ours = cuda.decode_attention(q, prepared(view), scale, sinks)
    assert ours.dtype == q.dtype
    assert ours.shape == q.shape
    size = float(mx.abs(truth).max())
    error = float(mx.abs(ours.astype(mx.float32) - truth).max())
    bound = {mx.float32: max(2e-5, 2**-24 * largest_logit), mx.float16: 1e-3, mx.bfloat16: 8e-3}[
        q.dtype
    ] * size
    if q.dtype != mx.float32 and view.tail_lengths is None and view.window is None:
        by_naive = float(mx.abs(naive(q, view, scale, sinks) - truth).max())
        bound = max(bound, 2 * by_naive) if np.isfinite(by_naive) else 2 * bound
    assert error <= bound, f"error {error:.3g} above {bound:.3g} of values up to {size:.3g}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("num_queries", [1, 2, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_the_reference(head_dim, group, num_queries, dtype):
    view = make_view(3, head_dim=head_dim, spare=2, dtype=dtype)
    assert_close(queries(2 * group, num_queries, head_dim, dtype), view, head_dim**-0.5)


@pytest.mark.parametrize(
    ("format", "head_dim"), [(f, d) for f, d in TILES if f != "int4c" and d in (80, 256, 512)]
)
@pytest.mark.parametrize(("group", "num_queries"), [(1, 1), (3, 2), (8, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_agrees_with_the_reference(format, head_dim, group, num_queries, dtype):
    view = make_view(3, head_dim=head_dim, spare=2, dtype=dtype, format=format)
    assert_close(queries(2 * group, num_queries, head_dim, dtype), view, head_dim**-0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_queries", range(1, 17))
def test_one_to_sixteen_queries(format, num_queries):
    view = make_view(4, head_dim=128, dtype=mx.float16, format=format)
    assert_close(queries(10, num_queries, 128, mx.float16), view, 128**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 37, 257])
def test_any_number_of_blocks(num_blocks, format, dtype):
    """257 blocks are 32,896 tokens, past what a 16-bit index reaches."""
    view = make_view(num_blocks, num_kv_heads=1, dtype=dtype, format=format)
    assert_close(queries(4, 1, 64, dtype), view, 0.125)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 37, 257])
@pytest.mark.parametrize(("batch", "group", "num_queries"), [(1, 17, 1), (4, 8, 1), (3, 3, 5), (1, 8, 16)])
def test_many_rows(num_blocks, batch, group, num_queries, head_dim, dtype):
    """17, 32, 45 and 128 rows of one KV head: whole and broken groups of 32."""
    view = make_view(num_blocks, num_kv_heads=1, head_dim=head_dim, batch=batch, dtype=dtype)
    assert_close(queries(group, num_queries, head_dim, dtype, batch=batch), view, head_dim**-0.5)


@pytest.mark.parametrize("num_tail", [63, 64, 65])
@pytest.mark.parametrize(("num_q_heads", "num_queries"), [(8, 1), (4, 4), (8, 4), (32, 4)])
def test_131072_tokens_and_one_less_and_one_more(num_tail, num_q_heads, num_queries):
    view = make_view(1023, num_kv_heads=1, head_dim=128, num_tail=num_tail, dtype=mx.float16)
    assert_close(queries(num_q_heads, num_queries, 128, mx.float16), view, 128**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_sinks", "num_tail"), [(0, 1), (64, 1), (1, 127), (64, 143), (17, 700)])
def test_any_length_of_the_dense_ends(num_sinks, num_tail, dtype):
    view = make_view(2, num_sinks=num_sinks, num_tail=num_tail, dtype=dtype)
    assert_close(queries(4, 1, 64, dtype), view, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token(dtype):
    view = make_view(0, num_sinks=0, num_tail=1, dtype=dtype)
    q = queries(4, 1, 64, dtype)
    out = cuda.decode_attention(q, prepared(view), 0.125)
    assert mx.allclose(out, mx.repeat(view.tail_v, 2, axis=1), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "num_q_heads"), [*((format, 4) for format in FORMATS), ("int4c", 64)])
@pytest.mark.parametrize("size", [1e-3, 100.0, 1e4])
def test_extreme_scores(size, format, num_q_heads, dtype):
    """At 1e4 most products q · k are outside float16."""
    view = make_view(2, dtype=dtype, format=format)
    assert_close(queries(num_q_heads, 1, 64, dtype, size=size), view, 1.0, largest_logit=120 * size)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("format", "num_q_heads"), [*((format, 16) for format in FORMATS), ("int4c", 64)])
@pytest.mark.parametrize("size", [1e-5, 1e-3, 300.0, 1e4])
def test_huge_and_tiny_keys_and_values(size, format, num_q_heads, dtype):
    """Value scales times weights pass both ends of float16; q shrinks as keys grow."""
    view = make_view(5, head_dim=128, dtype=dtype, format=format)
    k, v = (size * x for x in codec.decode(view.tiles, 128, format=format))
    small = [(size * x.astype(mx.float32)).astype(dtype) for x in (view.sinks_k, view.sinks_v)]
    tail = [(size * x.astype(mx.float32)).astype(dtype) for x in (view.tail_k, view.tail_v)]
    scaled = CacheView(*small, codec.encode(k, v, format), 5, *tail, format=format)
    assert_close(queries(num_q_heads, 1, 128, dtype, size=min(1.0, 1 / size)), scaled, 128**-0.5)


@pytest.mark.parametrize(("format", "rows"), [*((format, 8) for format in FORMATS), ("int4c", 32)])
def test_values_that_grow_along_the_context(format, rows):
    """Each block's values are four times the last one's, so that what is safe in float16 keeps changing."""
    mx.random.seed(3)
    growth = mx.repeat(4.0 ** mx.arange(8), BLOCK_TOKENS)[None, :, None] * 1e-3
    k, v = mx.random.normal((1, 1024, 64)), mx.random.normal((1, 1024, 64)) * growth
    empty = mx.zeros((1, 0, 64), mx.float16)
    tail = mx.zeros((1, 1, 1, 64), mx.float16)
    for values in (v, v[:, ::-1]):
        tiles = codec.encode(k, values, format)
        view = CacheView(empty, empty, tiles, 8, tail, tail, format=format)
        assert_close(queries(rows, 1, 64, mx.float16), view, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_average_the_values(dtype):
    mx.random.seed(1)
    k, v = mx.ones((1, BLOCK_TOKENS, 64)), mx.random.normal((1, BLOCK_TOKENS, 64))
    empty = mx.zeros((1, 0, 64), dtype)
    tiles = codec.encode(k, v)
    view = CacheView(empty, empty, tiles, 1, k[None, :, :1].astype(dtype), mx.zeros((1, 1, 1, 64), dtype))
    out = cuda.decode_attention(queries(2, 1, 64, dtype), prepared(view), 0.125)
    expected = codec.decode(tiles, 64)[1].sum(axis=1) / (BLOCK_TOKENS + 1)
    assert mx.allclose(
        out[0, :, 0], mx.broadcast_to(expected, (2, 64)), atol=2e-3 if dtype != mx.float32 else 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_logits_take_weight_and_give_nothing(dtype):
    view = make_view(2, dtype=dtype)
    q = queries(4, 2, 64, dtype)
    assert_close(q, view, 0.125, mx.array([0.5, -2.0, 30.0, 3.0]).astype(dtype))
    out = cuda.decode_attention(q, prepared(view), 0.125, mx.full((4,), 500.0).astype(dtype))
    assert mx.allclose(out, mx.zeros_like(q))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_rows_share_the_blocks_and_have_a_tail_each(num_queries, group, dtype):
    """A row of the batch gives what it gives alone, whatever stands in the padding of its tail."""
    view = make_view(2, num_tail=44, batch=3, dtype=dtype)
    q = queries(2 * group, num_queries, 64, dtype, batch=3)
    lengths = mx.array([44, 3, 21], dtype=mx.int32)
    padding = mx.arange(44)[None, None, :, None] >= lengths[:, None, None, None]
    tail_k, tail_v = mx.where(padding, mx.nan, view.tail_k), mx.where(padding, mx.nan, view.tail_v)
    together = replace(view, tail_k=tail_k, tail_v=tail_v, tail_lengths=lengths)
    assert_close(q, together, 0.125)
    out = cuda.decode_attention(q, prepared(together), 0.125)
    for row, length in enumerate(lengths.tolist()):
        k, v = (t[row : row + 1, :, :length] for t in (view.tail_k, view.tail_v))
        assert_close(q[row : row + 1], replace(view, tail_k=k, tail_v=v), 0.125)
        alone = cuda.decode_attention(q[row : row + 1], prepared(replace(view, tail_k=k, tail_v=v)), 0.125)
        assert mx.allclose(out[row], alone[0], atol=2e-2 if dtype == mx.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize(("num_tail", "window"), [(40, 8), (1500, 1024)])
def test_a_window_hides_what_is_older(num_queries, num_tail, window, dtype):
    tail = make_view(0, num_tail=num_tail, dtype=dtype)
    empty = mx.zeros((2, 0, 64), dtype)
    view = replace(tail, sinks_k=empty, sinks_v=empty, window=window)
    assert_close(queries(4, num_queries, 64, dtype), view, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_views_of_larger_ones(dtype):
    """Strides are read, not assumed: a cache's buffers have room, queries come transposed."""
    view = make_view(2, num_tail=20, dtype=dtype)
    wide = [
        mx.concatenate([x, mx.full((1, 2, 12, 64), mx.nan, dtype)], axis=2)
        for x in (view.tail_k, view.tail_v)
    ]
    q = queries(6, 2, 64, dtype)
    transposed = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)
    sliced = replace(view, tail_k=wide[0][:, :, :20], tail_v=wide[1][:, :, :20])
    a = cuda.decode_attention(q, prepared(view), 0.125)
    assert mx.array_equal(cuda.decode_attention(transposed, prepared(sliced), 0.125), a)
    backwards = mx.contiguous(q.swapaxes(2, 3)).swapaxes(2, 3)
    assert mx.array_equal(cuda.decode_attention(backwards, prepared(view), 0.125), a)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("format", "head_dim"), [*(("int4c", d) for d in (64, 80, 128, 256)), ("int8", 128), ("affine4", 128)]
)
@pytest.mark.parametrize("group", [4, 16, 32])
def test_the_path_without_bulk_copies(monkeypatch, format, head_dim, group, dtype):
    """What sm_80, sm_89 and sm_120 run: cp.async, and builds within 99 KB of shared memory."""
    smaller = Device(num_multiprocessors=80, shared_bytes=101376, bulk_copies=False)
    monkeypatch.setattr(cuda, "device", lambda: smaller)
    view = make_view(40, head_dim=head_dim, dtype=dtype, format=format)
    assert_close(queries(2 * group, 1, head_dim, dtype), view, head_dim**-0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("num_q_heads", [16, 128])
def test_peak_memory_does_not_grow_with_the_context(format, dtype, num_q_heads):
    """8K, 64K and 512K tokens: partials and the result, which stop growing when all processors are busy."""
    peaks = []
    for num_blocks in (64, 512, 4096):
        few = make_view(64, num_kv_heads=4, head_dim=128, dtype=dtype, format=format)
        tiles = mx.tile(cuda.to_device_order(few.tiles, 128, format), (num_blocks // 64, 1, 1))
        view = replace(few, tiles=tiles, num_blocks=num_blocks)
        q = queries(num_q_heads, 1, 128, dtype)
        mx.eval(view.tiles, view.sinks_k, view.sinks_v, view.tail_k, view.tail_v, q)
        mx.eval(cuda.decode_attention(q, view, 128**-0.5))  # what is kept for a shape is there
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(cuda.decode_attention(q, view, 128**-0.5))
        peaks.append(mx.get_peak_memory() - before)
    assert max(peaks) <= 8 << 20
    assert peaks[2] == peaks[1]


@pytest.mark.parametrize(("format", "head_dim"), TILES)
def test_device_order_and_back_changes_no_bit(format, head_dim):
    words = TileLayout(head_dim, format).tile_words
    tiles = mx.random.randint(0, 2**32, (3, 2, words), dtype=mx.uint32)
    there = cuda.to_device_order(tiles, head_dim, format)
    assert there.shape == tiles.shape
    assert mx.array_equal(cuda.to_canonical(there, head_dim, format), tiles)
    assert not mx.array_equal(there, tiles)


@pytest.mark.parametrize(("format", "head_dim"), TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_agrees_with_the_readable_one(format, head_dim, dtype):
    """All but one code in ten thousand are the same, 16 of 8 bits, and none differs by more than a step."""
    mx.random.seed(0)
    shape = (2, 3 * BLOCK_TOKENS, head_dim)
    k = (mx.random.normal(shape) + 4 * mx.random.normal((2, 1, head_dim))).astype(dtype)
    v = mx.random.normal(shape).astype(dtype)
    tiles, expected = cuda.encode(k, v, format), codec.encode(k, v, format)
    ours, theirs = codec.unpack(tiles, head_dim, format), codec.unpack(expected, head_dim, format)
    layout = ours.layout
    if layout.rotated:
        mean = mx.abs(ours.k_mean.astype(mx.float32) - theirs.k_mean.astype(mx.float32))
        assert float(mean.max()) <= 2**-10 * float(mx.abs(theirs.k_mean).max())
    for a, b, c, d, bits in (
        (ours.k_codes, theirs.k_codes, ours.k_scales, theirs.k_scales, layout.k_bits),
        (ours.v_codes, theirs.v_codes, ours.v_scales, theirs.v_scales, layout.v_bits),
    ):
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        a, b = ((x[..., None] >> shifts & 2**bits - 1).astype(mx.int32) for x in (a, b))
        same_scale = c == d
        assert float(same_scale.astype(mx.float32).mean()) > SAME_SCALES[bits]
        far = mx.abs(a - b).reshape(*c.shape, -1) * same_scale[..., None]
        assert int(far.max()) <= 1
        assert float((far != 0).astype(mx.float32).mean()) < 1e-4 * 2 ** (bits - 4)
    for x, y in zip(
        cuda.decode(tiles, head_dim, format=format), codec.decode(tiles, head_dim, format=format), strict=True
    ):
        assert mx.allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_equal_keys_come_back_exactly(format):
    zeros, threes = mx.zeros((1, BLOCK_TOKENS, 64)), mx.full((1, BLOCK_TOKENS, 64), 3.0)
    k, v = cuda.decode(cuda.encode(threes, zeros, format), 64, format=format)
    assert mx.all(k == 3.0)
    assert mx.all(v == 0)
