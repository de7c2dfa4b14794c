"""The Metal kernels against the exact result: on a Mac's GPU, or on the emulated grid where there is none.

The emulator adds to the comparison that no access leaves its buffer, reads what nobody wrote, or races, and
that no collective operation diverges; see tests/metal/emulator.
"""

from __future__ import annotations

import platform
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kernels import BLOCK_TOKENS, FORMATS, CacheView, TileLayout, codec
from kernels.codec import unpack
from kernels.metal import Launcher, Plan
from kernels.metal.launcher import MAX_SPLITS, ROW_CLASSES, row_class
from tests.kernels import rounding
from tests.kernels.attention_cases import decode_in_float64
from tests.metal.as_mlx import EmulatedMetal
from tests.metal.emulator import Options

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256, 512]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ON_GPU = mx.metal.is_available()

pytestmark = pytest.mark.skipif(
    not ON_GPU and platform.machine() != "x86_64", reason="no Apple GPU, and the emulator runs x86-64 code"
)


class Backend:
    """A launcher, and the order in which the emulated grid runs."""

    def __init__(self) -> None:
        self.emulator = EmulatedMetal()
        self.make = mx.fast.metal_kernel if ON_GPU else self.emulator.metal_kernel
        self.launcher = Launcher(self.make)

    def schedule(self, seed: int) -> None:
        self.emulator.options = Options(seed=seed)


@pytest.fixture(scope="module")
def metal():
    return Backend()


def make_view(
    num_blocks,
    num_kv_heads=2,
    head_dim=64,
    num_sinks=64,
    num_tail=20,
    batch=1,
    dtype=mx.float32,
    size=1.0,
    seed=0,
    format="int4c",
):
    """Random contents, and behind num_blocks two tiles whose every number is NaN."""
    mx.random.seed(seed)

    def dense(*leading):
        return (size * mx.random.normal((*leading, head_dim))).astype(dtype)

    shape = (num_kv_heads, BLOCK_TOKENS * num_blocks, head_dim)
    offset = mx.random.normal((num_kv_heads, 1, head_dim))
    tiles = codec.encode(size * (mx.random.normal(shape) + offset), size * mx.random.normal(shape), format)
    garbage = mx.full((2, *tiles.shape[1:]), 0xFFFFFFFF, dtype=mx.uint32)
    sinks, tail = (num_kv_heads, num_sinks), (batch, num_kv_heads, num_tail)
    tiles = mx.concatenate([tiles, garbage])
    return CacheView(
        dense(*sinks), dense(*sinks), tiles, num_blocks, dense(*tail), dense(*tail), format=format
    )


def queries(num_q_heads, num_queries, head_dim, dtype=mx.float32, size=1.0, batch=1):
    return (size * mx.random.normal((batch, num_q_heads, num_queries, head_dim))).astype(dtype)


def assert_within_contract(metal, q, view, scale, sinks=None):
    out = metal.launcher.decode_attention(q, view, scale, sinks)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    rounding.assert_within_contract(out, rounding.cached_attention(q, view, scale, sinks))


def shape_of(num_rows):
    """(group, Sq) whose product is num_rows."""
    return {2: (1, 2), 4: (4, 1), 8: (8, 1), 16: (8, 2), 32: (2, 16)}[num_rows]


INSTANCES = [(d, rows) for d in HEAD_DIMS for rows in ROW_CLASSES if row_class(rows, d) == rows]


@pytest.mark.parametrize(("head_dim", "rows"), INSTANCES)
def test_every_head_size_and_row_class(metal, head_dim, rows):
    group, num_queries = shape_of(rows)
    metal.schedule(head_dim + rows)
    view = make_view(2, head_dim=head_dim, num_tail=37)
    q = queries(2 * group, num_queries, head_dim)
    sinks = mx.random.normal((2 * group,))
    assert_within_contract(metal, q, view, head_dim**-0.5, sinks)


FORMAT_INSTANCES = [
    (format, head_dim, rows)
    for format in FORMATS[1:]
    for head_dim, rows in (
        *((64, 2), (64, 8), (64, 32), (80, 4), (96, 16), (112, 2)),
        *((128, 4), (128, 16), (192, 8), (256, 2), (512, 8)),
    )
    if format != "affine4" or head_dim % 64 == 0
]


@pytest.mark.parametrize(("format", "head_dim", "rows"), FORMAT_INSTANCES)
def test_every_format(metal, format, head_dim, rows):
    """Every head size, and every row class at a head size that all formats have."""
    group, num_queries = shape_of(rows)
    metal.schedule(head_dim + rows)
    view = make_view(2, head_dim=head_dim, num_tail=37, format=format)
    assert_within_contract(metal, queries(2 * group, num_queries, head_dim), view, head_dim**-0.5)


@pytest.mark.parametrize("dense", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [3, 8])
def test_every_pair_of_dtypes(metal, dtype, dense, group):
    view = make_view(2, head_dim=128, dtype=dense)
    assert_within_contract(metal, queries(2 * group, 1, 128, dtype), view, 128**-0.5)


@pytest.mark.parametrize("num_queries", range(1, 17))
def test_one_to_sixteen_queries(metal, num_queries):
    metal.schedule(num_queries)
    for group in (1, 2, 5):
        view = make_view(1, num_tail=num_queries + num_queries % 3, num_kv_heads=1, seed=num_queries)
        assert_within_contract(metal, queries(group, num_queries, 64), view, 0.125)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 40])
def test_any_ratio_of_heads(metal, group):
    metal.schedule(group)
    assert_within_contract(metal, queries(2 * group, 1, 64), make_view(2), 0.125)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7, 8, 9, 17, 40])
@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_blocks(metal, format, num_blocks, group):
    metal.schedule(num_blocks)
    view = make_view(num_blocks, num_kv_heads=1, format=format)
    assert_within_contract(metal, queries(group, 1, 64), view, 0.125)


@pytest.mark.parametrize(
    ("num_sinks", "num_tail"), [(0, 1), (1, 2), (64, 1), (3, 127), (64, 143), (300, 700)]
)
@pytest.mark.parametrize("group", [1, 8])
def test_any_length_of_the_dense_ends(metal, num_sinks, num_tail, group):
    view = make_view(1, num_sinks=num_sinks, num_tail=num_tail)
    assert_within_contract(metal, queries(2 * group, 1, 64), view, 0.125)


@pytest.mark.parametrize("threadgroups", [1, 3, 10**6])
@pytest.mark.parametrize("group", [1, 8])
def test_any_number_of_splits(metal, threadgroups, group):
    """One; one that the blocks don't divide by; as many as there are blocks."""
    view = make_view(11, num_kv_heads=1)
    q = queries(group, 1, 64)
    launcher = Launcher(metal.make, Plan(threadgroups=threadgroups, max_splits=threadgroups))
    out = launcher.decode_attention(q, view, 0.125)
    rounding.assert_within_contract(out, rounding.cached_attention(q, view, 0.125))


def test_every_plan_splits_at_least_once_and_no_more_than_combine_weighs():
    for plan in [*Plan.candidates(), Plan.for_architecture("applegpu_g13s"), Plan(1, 10**6)]:
        for num_blocks in (1, 7, 1023, 8192):
            for threadgroups in (1, 8, 64, 4096):
                splits = plan.num_splits(num_blocks, threadgroups)
                assert 1 <= splits <= min(num_blocks, MAX_SPLITS // 2)
        assert plan.num_splits(0, 8) == 0


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_random_schedules_change_nothing(metal, format, group):
    """13 orders of threadgroups, simdgroups, lanes and of the additions in simd_sum."""
    view = make_view(3, num_kv_heads=1, num_tail=70, format=format)
    q = queries(group, 2, 64)
    exact = rounding.cached_attention(q, view, 0.125)
    for seed in range(13):
        metal.schedule(seed)
        rounding.assert_within_contract(metal.launcher.decode_attention(q, view, 0.125), exact, seed)


@pytest.mark.parametrize("group", [1, 8])
def test_past_a_16_bit_index(metal, group):
    """257 blocks are 32,896 tokens."""
    assert_within_contract(metal, queries(group, 1, 64), make_view(257, num_kv_heads=1), 0.125)


@pytest.mark.parametrize(("num_tail", "group"), [(63, 2), (64, 8), (65, 2)])
def test_around_128k_tokens(metal, num_tail, group):
    """64 sinks, 1,023 blocks and the tail are 131,071 tokens and up; all are emulated, of one KV head."""
    view = make_view(1023, num_kv_heads=1, num_sinks=64, num_tail=num_tail)
    assert_within_contract(metal, queries(group, 1, 64), view, 0.125)


@pytest.mark.parametrize("size", [1e-3, 100.0, 1e4])
@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_scores(metal, format, size, group):
    for sign in (-1, 1):
        q = queries(2 * group, 1, 64, size=sign * size)
        assert_within_contract(metal, q, make_view(2, format=format), 1.0)


@pytest.mark.parametrize("group", [2, 8])
def test_scores_beyond_float16(metal, group):
    """q · k reaches 10^6."""
    view = make_view(2, dtype=mx.float16, size=100.0)
    q = queries(2 * group, 1, 64, mx.float16, size=100.0)
    assert_within_contract(metal, q, view, 1.0)


@pytest.mark.parametrize("size", [1e-4, 1e3])
@pytest.mark.parametrize("format", FORMATS)
def test_huge_and_tiny_keys_and_values(metal, format, size):
    view = make_view(2, size=size, format=format)
    for group in (2, 8):
        assert_within_contract(metal, queries(2 * group, 1, 64), view, 0.125 / size)


@pytest.mark.parametrize("group", [2, 8])
def test_equal_keys_average_the_values(metal, group):
    mx.random.seed(1)
    k, v = mx.ones((1, BLOCK_TOKENS, 64)), mx.random.normal((1, BLOCK_TOKENS, 64))
    empty = mx.zeros((1, 0, 64))
    tiles = codec.encode(k, v)
    view = CacheView(empty, empty, tiles, 1, k[None, :, :1], mx.zeros((1, 1, 1, 64)))
    q = queries(group, 1, 64)
    means = decode_in_float64(tiles, 64)[1].sum(axis=1) / (BLOCK_TOKENS + 1)
    assert np.allclose(rounding.cached_attention(q, view, 0.125).truth[0, :, 0], means, rtol=0, atol=1e-14)
    assert_within_contract(metal, q, view, 0.125)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_sink_logits_take_weight_and_give_nothing(metal, group, dtype):
    view = make_view(2)
    q = queries(2 * group, 2, 64)
    logits = mx.random.normal((2 * group,)) * 10
    assert_within_contract(metal, q, view, 0.125, logits.astype(dtype))
    out = metal.launcher.decode_attention(q, view, 0.125, mx.full((2 * group,), 500.0))
    assert mx.allclose(out, mx.zeros_like(q))


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("format", "batch"), [("int4c", 3), *((format, 9) for format in FORMATS)])
def test_rows_share_the_blocks_and_have_a_tail_each(metal, num_queries, group, format, batch):
    """A row gives what it gives alone, whatever stands in the padding of its tail."""
    view = make_view(2, num_tail=24, batch=batch, format=format)
    q = queries(2 * group, num_queries, 64, batch=batch)
    lengths = mx.array([24, 3, 11, 20, 4, 9, 23, 17, 3][:batch], dtype=mx.int32)
    padding = mx.arange(24)[None, None, :, None] >= lengths[:, None, None, None]
    tail_k, tail_v = mx.where(padding, mx.nan, view.tail_k), mx.where(padding, mx.nan, view.tail_v)
    view = replace(view, tail_k=tail_k, tail_v=tail_v, tail_lengths=lengths)
    assert_within_contract(metal, q, view, 0.125)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize(("num_tail", "window"), [(40, 8), (600, 300), (40, 100), (600, 1)])
@pytest.mark.parametrize("group", [2, 8])
def test_a_window_hides_what_is_older(metal, num_queries, num_tail, window, group):
    """What no query sees is NaN."""
    view = make_view(0, num_sinks=0, num_tail=num_tail)
    hidden = (mx.arange(num_tail) < num_tail - num_queries + 1 - window)[:, None]
    tail_k, tail_v = mx.where(hidden, mx.nan, view.tail_k), mx.where(hidden, mx.nan, view.tail_v)
    view = replace(view, tail_k=tail_k, tail_v=tail_v, window=window)
    assert_within_contract(metal, queries(2 * group, num_queries, 64), view, 0.125)


def test_a_growing_context_compiles_nothing_new(metal):
    launcher = Launcher(metal.make)
    for num_blocks, num_tail in ((1, 3), (2, 100), (9, 300)):
        view = make_view(num_blocks, num_kv_heads=1, num_tail=num_tail)
        mx.eval(launcher.decode_attention(queries(8, 1, 64), view, 0.125))
    if not ON_GPU:
        assert metal.emulator.num_programs == {**metal.emulator.num_programs, "longleaf_split": 1}


def keys_and_values(head_dim, dtype=mx.float32, num_blocks=2, size=1.0):
    mx.random.seed(head_dim)
    shape = (3, num_blocks * BLOCK_TOKENS, head_dim)
    k = mx.random.normal(shape) + 4 * mx.random.normal((3, 1, head_dim))
    return (size * k).astype(dtype), (size * mx.random.normal(shape)).astype(dtype)


CODEC_CASES = [("int4c", d) for d in HEAD_DIMS]
CODEC_CASES += [(f, d) for f in FORMATS[1:] for d in (64, 80, 128, 512) if f != "affine4" or d != 80]


@pytest.mark.parametrize(("format", "head_dim"), CODEC_CASES)
def test_encode_gives_the_reference_tiles(metal, format, head_dim):
    """The codes of a value at the edge of two may differ, and the scale of a group between two equal ones."""
    k, v = keys_and_values(head_dim)
    metal.schedule(head_dim)
    tiles = metal.launcher.encode(k, v, format)
    ours, theirs = unpack(tiles, head_dim, format), unpack(codec.encode(k, v, format), head_dim, format)
    means = ("k_mean",) if ours.layout.rotated else ("k_biases", "v_biases")
    for part in ("k_codes", "k_scales", "v_codes", "v_scales", *means):
        different = (getattr(ours, part) != getattr(theirs, part)).astype(mx.float32)
        assert float(different.mean()) < 5e-3, part
    decoded = codec.decode(tiles, head_dim, format=format)
    best = codec.decode(codec.encode(k, v, format), head_dim, format=format)
    for x, back, plain in zip((k, v), decoded, best, strict=True):
        assert float(mx.linalg.norm(back - x)) <= 1.0001 * float(mx.linalg.norm(plain - x))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_encode_takes_half_precision(metal, dtype):
    k, v = keys_and_values(128, dtype)
    ours, theirs = metal.launcher.encode(k, v), codec.encode(k, v)
    assert float((ours != theirs).astype(mx.float32).mean()) < 5e-3


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4, 1e7])
@pytest.mark.parametrize("format", FORMATS)
def test_encode_survives_any_magnitude(metal, format, size):
    k, v = keys_and_values(64, size=size)
    ours, theirs = metal.launcher.encode(k, v, format), codec.encode(k, v, format)
    if size == 0:  # any code stands for zero where the scale is zero
        assert all(mx.array_equal(x, mx.zeros_like(x)) for x in codec.decode(ours, 64, format=format))
    else:
        assert float((ours != theirs).astype(mx.float32).mean()) < 5e-3


@pytest.mark.parametrize(("format", "head_dim"), CODEC_CASES)
def test_decode_gives_the_reference_numbers(metal, format, head_dim):
    k, v = keys_and_values(head_dim)
    tiles = codec.encode(k, v, format)
    metal.schedule(head_dim)
    decoded = metal.launcher.decode(tiles, head_dim, format=format)
    for ours, exact in zip(decoded, rounding.decoded_numbers(tiles, head_dim, format), strict=True):
        rounding.assert_within_contract(ours, exact)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_decode_rounds_once(metal, dtype):
    tiles = codec.encode(*keys_and_values(128))
    expected = codec.decode(tiles, 128, dtype)
    for ours, theirs in zip(metal.launcher.decode(tiles, 128, dtype), expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours != theirs).astype(mx.float32).mean()) < 1e-2


def test_no_blocks_encode_and_decode_to_nothing(metal):
    tiles = metal.launcher.encode(mx.zeros((2, 0, 64)), mx.zeros((2, 0, 64)))
    assert tiles.shape == (0, 2, TileLayout(64).tile_words)
    assert metal.launcher.decode(tiles, 64)[0].shape == (2, 0, 64)


def test_wrong_shapes_are_refused(metal):
    with pytest.raises(ValueError, match="whole 128-token blocks"):
        metal.launcher.encode(mx.zeros((1, 100, 64)), mx.zeros((1, 100, 64)))
    with pytest.raises(ValueError, match="not int4c tiles of head size 128"):
        metal.launcher.decode(mx.zeros((1, 1, 5), dtype=mx.uint32), 128)
