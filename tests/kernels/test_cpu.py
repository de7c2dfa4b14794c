"""The C++ backend against the exact result on the same codes, with every instruction set there is here."""

import ctypes
import mmap
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import make_view, queries

import kernels
from kernels import BLOCK_TOKENS, FORMATS, CacheView, TileLayout, codec, cpu, unfused
from kernels.codec import unpack
from kernels.cpu import build
from kernels.formats import midrise, rotation
from tests.kernels import rounding

HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512]
OTHER_FORMATS = [format for format in FORMATS if format != "int4c"]


@cache
def backends():
    """The library once per instruction set that this processor has."""
    path = build.library()
    found = []
    for isa in ("avx512", "avx2", "baseline"):
        try:
            found.append(cpu.Library(path, threads=2, isa=isa))
        except ValueError:
            assert isa != "baseline"
    return found


def assert_close(q, view, scale, sinks=None, seen=None):
    """`seen` is the cache that must be read where `view` holds more, or holds it elsewhere."""
    exact = rounding.cached_attention(q, seen or view, scale, sinks)
    for backend in backends():
        ours = backend.decode_attention(q, view, scale, sinks)
        assert ours.dtype == q.dtype
        assert ours.shape == q.shape
        rounding.assert_within_contract(ours, exact, backend.isa)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("num_queries", [1, 2, 16])
def test_it_agrees_with_the_reference(head_dim, group, num_queries):
    view = make_view(3, head_dim=head_dim, spare=2)
    assert_close(queries(2 * group, num_queries, head_dim), view, head_dim**-0.5)


def head_dims_of(format):
    return [64, 128, 512] if format == "affine4" else [16, 48, 64, 80, 128, 512]


FORMAT_CASES = [(format, d) for format in OTHER_FORMATS for d in head_dims_of(format)]


@pytest.mark.parametrize(("format", "head_dim"), FORMAT_CASES)
@pytest.mark.parametrize(("group", "num_queries"), [(1, 1), (3, 1), (5, 1), (8, 5)])
def test_every_format_agrees_with_the_reference(format, head_dim, group, num_queries):
    view = make_view(3, head_dim=head_dim, spare=2, format=format)
    assert_close(queries(2 * group, num_queries, head_dim), view, head_dim**-0.5)


@pytest.mark.parametrize("format", OTHER_FORMATS)
@pytest.mark.parametrize("group", [2, 4, 6, 7, 9, 17])
def test_any_number_of_rows_of_every_format(format, group):
    assert_close(queries(2 * group, 1, 128), make_view(2, head_dim=128, format=format), 128**-0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_keys_and_values_far_from_zero_lose_nothing_to_it(format, offset):
    """Affine codes aren't centred: their offsets are most of what they stand for."""
    mx.random.seed(7)
    k, v = (mx.random.normal((2, 2 * BLOCK_TOKENS, 64)) + offset for _ in "kv")
    view = replace(make_view(2), tiles=codec.encode(k, v, format), format=format)
    q = queries(6, 1, 64)
    assert_close(q, view, 0.125)


@pytest.mark.parametrize("group", range(1, 18))
def test_any_number_of_rows(group):
    """Past eight rows a tile is passed over more than once; every remainder has its own code."""
    assert_close(queries(2 * group, 1, 80), make_view(2, head_dim=80), 80**-0.5)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7, 33, 257])
def test_any_number_of_blocks(num_blocks):
    """257 blocks are 32,896 tokens, past what a 16-bit index reaches."""
    view = make_view(num_blocks, num_kv_heads=1)
    q = queries(4, 1, 64)
    assert_close(q, view, 0.125)


@pytest.mark.parametrize("num_tail", [63, 64, 65])
def test_131072_tokens_and_one_more_or_less(num_tail):
    view = make_view(1023, num_kv_heads=1, num_sinks=64, num_tail=num_tail)
    q = queries(3, 1, 64)
    assert_close(q, view, 0.125)


@pytest.mark.parametrize(
    ("num_sinks", "num_tail"), [(0, 1), (64, 1), (1, 127), (64, 143), (300, 5), (0, 1300)]
)
@pytest.mark.parametrize("num_blocks", [0, 2])
def test_any_length_of_the_dense_ends(num_sinks, num_tail, num_blocks):
    assert_close(queries(4, 1, 64), make_view(num_blocks, num_sinks=num_sinks, num_tail=num_tail), 0.125)


@pytest.mark.parametrize("q_dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("kv_dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_every_dtype_of_queries_over_every_dtype_of_cache(q_dtype, kv_dtype):
    view = make_view(2, head_dim=128, dtype=kv_dtype)
    assert_close(queries(4, 4, 128, q_dtype), view, 128**-0.5)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_scores(format, size):
    view, q = make_view(2, format=format), queries(4, 1, 64, size=size)
    assert_close(q, view, 1.0)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e4])
def test_extreme_keys_and_values(size):
    """1e-6 leaves subnormal float16 scales."""
    view = make_view(2)
    k, v = (size * x for x in codec.decode(view.tiles, 64))
    ends = (size * x for x in (view.sinks_k, view.sinks_v))
    tail = (size * x for x in (view.tail_k, view.tail_v))
    view = CacheView(*ends, codec.encode(k, v), 2, *tail)
    q = queries(4, 1, 64)
    assert_close(q, view, 0.125 / size)


def test_scores_past_float16_do_not_overflow():
    view = make_view(2, dtype=mx.float16)
    q = queries(4, 1, 64, dtype=mx.float16, size=1e4)
    assert_close(q, view, 1.0)


def test_equal_keys_average_the_values():
    mx.random.seed(1)
    k, v = mx.ones((1, BLOCK_TOKENS, 64)), mx.random.normal((1, BLOCK_TOKENS, 64))
    empty = mx.zeros((1, 0, 64))
    view = CacheView(empty, empty, codec.encode(k, v), 1, k[None, :, :1], mx.zeros((1, 1, 1, 64)))
    q = queries(2, 1, 64)
    assert_close(q, view, 0.125)


def test_sink_logits_take_weight_and_give_nothing():
    view, q = make_view(2), queries(4, 2, 64)
    assert_close(q, view, 0.125, mx.array([0.5, -2.0, 30.0, 3.0]))
    assert_close(q, view, 0.125, mx.array([0.5, -2.0, 30.0, 3.0]).astype(mx.bfloat16))
    for backend in backends():
        out = backend.decode_attention(q, view, 0.125, mx.full((4,), 500.0))
        assert mx.allclose(out, mx.zeros_like(q)), backend.isa


@pytest.mark.parametrize(("batch", "num_queries"), [(3, 1), (3, 5), (16, 1)])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_share_the_blocks_and_have_a_tail_each(format, batch, num_queries):
    """Whatever stands in the padding of a row's tail."""
    view = make_view(2, num_tail=24, batch=batch, format=format)
    lengths = mx.array(([24, 6, 11] * batch)[:batch], dtype=mx.int32)
    padding = mx.arange(24)[None, None, :, None] >= lengths[:, None, None, None]
    tail_k, tail_v = mx.where(padding, mx.nan, view.tail_k), mx.where(padding, mx.nan, view.tail_v)
    view = replace(view, tail_k=tail_k, tail_v=tail_v, tail_lengths=lengths)
    assert_close(queries(6, num_queries, 64, batch=batch), view, 0.125)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize(("num_tail", "window"), [(40, 8), (1500, 700), (1500, 3), (9, 100)])
def test_a_window_hides_what_is_older(num_queries, num_tail, window):
    tail = make_view(0, num_tail=num_tail)
    empty = mx.zeros((2, 0, 64))
    older = mx.arange(num_tail)[:, None] < num_tail - num_queries - window + 1
    k, v = (mx.where(older, mx.nan, x) for x in (tail.tail_k, tail.tail_v))
    view = CacheView(empty, empty, tail.tiles, 0, k, v, window=window)
    clean = CacheView(empty, empty, tail.tiles, 0, tail.tail_k, tail.tail_v, window=window)
    q = queries(4, num_queries, 64)
    assert_close(q, view, 0.125, seen=clean)


def test_arrays_that_lie_apart_in_memory_are_read_where_they_are():
    view = make_view(2, num_tail=20, head_dim=64)

    def spread(x, axis):
        """x as a slice of a larger array that holds NaN around it."""
        margin = mx.full((*x.shape[:axis], 7, *x.shape[axis + 1 :]), mx.nan)
        larger = mx.concatenate([margin, x, margin], axis=axis)
        return mx.slice(larger, mx.array([7]), [axis], list(x.shape))

    apart = CacheView(
        spread(view.sinks_k, 1),
        spread(view.sinks_v, 1),
        view.tiles,
        2,
        spread(view.tail_k, 2),
        spread(view.tail_v, 2)[..., ::-1][..., ::-1],
    )
    q = queries(4, 3, 64)
    assert_close(q.swapaxes(1, 2).swapaxes(1, 2), apart, 0.125, seen=view)
    by_token = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)
    assert_close(by_token, apart, 0.125, seen=view)


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
def test_any_number_of_threads(threads):
    view, q = make_view(40, num_kv_heads=3), queries(9, 2, 64)
    exact = rounding.cached_attention(q, view, 0.125)
    backend = cpu.Library(build.library(), threads=threads)
    for _ in range(20):
        rounding.assert_within_contract(backend.decode_attention(q, view, 0.125), exact)


def test_calls_from_several_threads_at_once_do_not_meet():
    backend = backends()[0]
    views = [make_view(n) for n in (1, 5, 9, 13)]
    wanted = [backend.decode_attention(queries(4, 1, 64), view, 0.125) for view in views]
    mx.random.seed(0)
    asked = [queries(4, 1, 64) for _ in views]
    wanted = [
        np.array(backend.decode_attention(q, view, 0.125)) for q, view in zip(asked, views, strict=True)
    ]
    mx.eval(asked, [[v.tiles, v.sinks_k, v.sinks_v, v.tail_k, v.tail_v] for v in views])
    wrong = []

    def ask(i):
        for _ in range(50):
            out = np.array(backend.decode_attention(asked[i], views[i], 0.125))
            if not np.array_equal(out, wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(views))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("format", FORMATS)
def test_memory_does_not_grow_with_the_context(format):
    """Beyond the cache itself: what MLX allocates is the output."""
    peaks = []
    for num_blocks in (8, 256):
        view, q = make_view(num_blocks, format=format), queries(4, 1, 64)
        mx.eval(q, view.tiles, view.sinks_k, view.sinks_v, view.tail_k, view.tail_v)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(backends()[0].decode_attention(q, view, 0.125))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[0] == peaks[1] <= 65_536


@pytest.mark.parametrize("named", ["0", "-1", "two", ""])
def test_a_bad_thread_count_is_refused(monkeypatch, named):
    monkeypatch.setenv("LONGLEAF_CPU_THREADS", named)
    with pytest.raises(ValueError, match="LONGLEAF_CPU_THREADS"):
        cpu.Library(build.library())


def test_the_environment_sets_the_threads(monkeypatch):
    monkeypatch.setenv("LONGLEAF_CPU_THREADS", "3")
    assert cpu.Library(build.library()).threads == 3


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="lacks the instruction set 'avx1024'"):
        cpu.Library(build.library(), isa="avx1024")


# ---- the codec ----


def group_errors(tiles, x, head_dim, part, format="int4c"):
    """Squared error of each token's group in the rotated basis: (blocks, heads, 128, groups)."""
    parts = unpack(tiles, head_dim, format)
    bits = parts.layout.k_bits if part == "k" else parts.layout.v_bits
    codes, scales = (parts.k_codes, parts.k_scales) if part == "k" else (parts.v_codes, parts.v_scales)
    heads = x.shape[0]
    blocks = np.array(x.astype(mx.float32)).astype(np.float64)
    blocks = blocks.reshape(heads, -1, BLOCK_TOKENS, head_dim).transpose(1, 0, 2, 3)
    if part == "k":
        blocks = blocks - np.array(parts.k_mean).astype(np.float64)[:, :, None]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (np.array(codes)[..., None] >> shifts & 2**bits - 1).reshape(blocks.shape)
    groups = scales.shape[-1]
    decoded = (numbers - midrise(bits)) * np.array(scales).astype(np.float64).repeat(
        head_dim // groups, axis=-1
    )
    rotated = blocks @ np.array(rotation(head_dim)).astype(np.float64)
    return ((decoded - rotated) ** 2).reshape(*blocks.shape[:-1], groups, -1).sum(axis=-1)


CODEC_CASES = [("int4c", d) for d in HEAD_DIMS] + FORMAT_CASES
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize(("format", "head_dim"), [c for c in CODEC_CASES if c[0] != "affine4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_plain_codec_but_for_ties(format, head_dim, dtype):
    """What is on the edge of two codes, scales or means may fall either way; nothing is lost by it."""
    mx.random.seed(2)
    shape = (3, 2 * BLOCK_TOKENS, head_dim)
    k = (mx.random.normal(shape) + 4 * mx.random.normal((3, 1, head_dim))).astype(dtype)
    v = mx.random.normal(shape).astype(dtype)
    plain = codec.encode(k, v, format)
    for backend in backends():
        ours = backend.encode(k, v, format)
        assert ours.dtype == mx.uint32
        assert ours.shape == plain.shape
        # Edges are sixteen times as close to each other in eight bits.
        assert float((ours == plain).mean()) > (0.99 if format == "int4c" else 0.98), backend.isa
        for part, x in (("k", k), ("v", v)):
            theirs = group_errors(plain, x, head_dim, part, format)
            worse = group_errors(ours, x, head_dim, part, format) - theirs
            # A scale or a mean between two float16 numbers that rounds the other way is off by one unit.
            coarse = format == "int4c" or (format == "k8v4" and part == "v")
            assert worse.max() <= (1e-2 if coarse else 0.2) * theirs.max(), backend.isa
            assert worse.sum() <= (1e-5 if coarse else 1e-3) * theirs.sum(), backend.isa


@pytest.mark.parametrize("head_dim", head_dims_of("affine4"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_affine_codes_are_exactly_those_of_mlx(head_dim, dtype, offset):
    """Far from zero, steps are lost in the numbers; equal numbers have none. Half of the keys are equal."""
    mx.random.seed(8)
    shape = (2, 2 * BLOCK_TOKENS, head_dim)
    x = (mx.random.normal(shape) + offset).astype(dtype)
    equal = mx.where(mx.arange(shape[1])[:, None] % 2 == 0, x[:, :, :1], x)
    for backend in backends():
        ours = backend.encode(equal, -x, "affine4")
        assert mx.array_equal(ours, codec.encode(equal, -x, "affine4")), backend.isa


@pytest.mark.parametrize(("format", "head_dim"), CODEC_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_gives_the_numbers_of_the_codes(format, head_dim, dtype):
    mx.random.seed(3)
    shape = (2, 3 * BLOCK_TOKENS, head_dim)
    tiles = codec.encode(mx.random.normal(shape) + 2, mx.random.normal(shape), format)
    numbers = rounding.decoded_numbers(tiles, head_dim, format)
    for backend in backends():
        for ours, exact in zip(backend.decode(tiles, head_dim, dtype, format), numbers, strict=True):
            assert ours.dtype == dtype
            assert ours.shape == exact.truth.shape
            rounding.assert_within_contract(ours, exact, backend.isa)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_encoding_with_any_number_of_threads_gives_the_same_tiles(threads):
    mx.random.seed(4)
    k, v = mx.random.normal((3, 9 * BLOCK_TOKENS, 64)), mx.random.normal((3, 9 * BLOCK_TOKENS, 64))
    one = cpu.Library(build.library(), threads=1)
    many = cpu.Library(build.library(), threads=threads)
    tiles = one.encode(k, v)
    assert mx.array_equal(many.encode(k, v), tiles)
    for a, b in zip(many.decode(tiles, 64), one.decode(tiles, 64), strict=True):
        assert mx.array_equal(a, b)


def test_slices_of_a_larger_cache_encode_as_their_copies():
    mx.random.seed(5)
    cache = mx.random.normal((1, 2, 1000, 64))
    part = cache[0, :, 100 : 100 + 3 * BLOCK_TOKENS]
    across = cache[0, :, 3 : 3 + 3 * BLOCK_TOKENS].swapaxes(0, 1)
    across = mx.contiguous(across).swapaxes(0, 1)
    for backend in backends():
        copies = (mx.contiguous(part), mx.contiguous(across))
        assert mx.array_equal(backend.encode(part, across), backend.encode(*copies))


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-4, 1e4, 1e7])
@pytest.mark.parametrize("format", FORMATS)
def test_magnitudes_and_zeros_scale_through(format, size):
    mx.random.seed(6)
    k, v = (size * mx.random.normal((2, BLOCK_TOKENS, 64)) for _ in "kv")
    theirs = codec.decode(codec.encode(k, v, format), 64, format=format)
    for backend in backends():
        decoded = backend.decode(backend.encode(k, v, format), 64, format=format)
        for x, ours, plain in zip((k, v), decoded, theirs, strict=True):
            bound = float(mx.linalg.norm(x - plain)) * 1.001
            assert float(mx.linalg.norm(x - ours)) <= bound, backend.isa


@pytest.mark.parametrize("format", FORMATS)
def test_infinite_and_missing_numbers_encode_without_harm(format):
    k = mx.full((1, BLOCK_TOKENS, 64), mx.nan)
    v = mx.full((1, BLOCK_TOKENS, 64), mx.inf)
    for backend in backends():
        assert backend.encode(k, v, format).shape == (1, 1, TileLayout(64, format).tile_words)


def test_no_blocks_encode_to_no_tiles():
    empty = mx.zeros((2, 0, 64))
    for backend in backends():
        tiles = backend.encode(empty, empty)
        assert tiles.shape == (0, 2, TileLayout(64).tile_words)
        assert backend.decode(tiles, 64)[0].shape == (2, 0, 64)


def test_what_does_not_fit_the_codec_is_refused():
    backend = backends()[0]
    with pytest.raises(ValueError, match="whole 128-token blocks"):
        backend.encode(mx.zeros((1, 100, 64)), mx.zeros((1, 100, 64)))
    with pytest.raises(ValueError, match="head size 72"):
        backend.encode(mx.zeros((1, 128, 72)), mx.zeros((1, 128, 72)))
    with pytest.raises(ValueError, match="head size 160"):
        backend.encode(mx.zeros((1, 128, 160)), mx.zeros((1, 128, 160)))
    tiles = backend.encode(mx.zeros((1, 128, 64)), mx.zeros((1, 128, 64)))
    with pytest.raises(ValueError, match="not int4c tiles of head size 128"):
        backend.decode(tiles, 128)


# ---- memory ----


class Fenced:
    """Bytes that end where an unreadable page begins, or start where one ends."""

    def __init__(self, data, at_end):
        self.size, page = data.nbytes, mmap.PAGESIZE
        inner = -(-max(self.size, 1) // page) * page
        self.map = mmap.mmap(-1, inner + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (start, start + page + inner):
            assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0  # PROT_NONE
        self.address = start + page + (inner - self.size if at_end else 0)
        ctypes.memmove(self.address, data.ctypes.data, self.size)

    def bytes(self):
        return ctypes.string_at(self.address, self.size)


@pytest.mark.parametrize(
    ("format", "head_dim"),
    [
        *(("int4c", d) for d in (16, 64, 80, 128)),
        *(("k8v4", 80), ("int8", 16), ("int8", 80), ("int8", 128), ("affine4", 32), ("affine4", 128)),
    ],
)
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nothing_is_read_or_written_outside_the_arrays(format, head_dim, at_end, dtype):
    """Every array ends, or starts, at a page that may not be touched: one byte too far kills the process."""
    rng = np.random.default_rng(0)
    view = make_view(2, num_kv_heads=2, head_dim=head_dim, num_sinks=5, num_tail=7, format=format)
    coding = cpu._coding(TileLayout(head_dim, format))
    fences = []

    def fenced(x):
        fences.append(Fenced(np.ascontiguousarray(x), at_end))
        return fences[-1].address

    def tensor(x):
        strides = [s // x.itemsize for s in np.ascontiguousarray(x).strides[:-1]]
        strides = [0] * (3 - len(strides)) + strides
        return cpu._Tensor(fenced(x), (ctypes.c_int64 * 3)(*strides), int(dtype == np.float16))

    def numbers(*shape):
        return rng.standard_normal((*shape, head_dim)).astype(dtype)

    tiles = np.array(view.tiles)
    forward = np.array(rotation(head_dim))
    q = numbers(1, 6, 3)
    for backend in backends():
        job = cpu._Attention(
            *map(
                tensor,
                (q, numbers(2, 5), numbers(2, 5), numbers(1, 2, 7), numbers(1, 2, 7), np.zeros_like(q)),
            ),
            *map(fenced, (tiles, np.array([7], np.int32), np.zeros(6, np.float32), forward, forward.T)),
            *(1, 6, 2, 3, head_dim, 5, 2, 7, 0, coding, 0.1),
        )
        assert backend._lib.longleaf_attend(ctypes.byref(job), backend._set, 2) == 0
        k, v = numbers(2, 256), numbers(2, 256)
        job = cpu._Recode(
            *map(tensor, (k, v)),
            *map(fenced, (np.zeros_like(tiles), forward, forward.T)),
            *(2, 2, head_dim, coding),
        )
        assert backend._lib.longleaf_encode(ctypes.byref(job), backend._set, 2) == 0
        assert backend._lib.longleaf_decode(ctypes.byref(job), backend._set, 2) == 0


UNDEFINED = """
import sys
import mlx.core as mx
sys.path[:0] = sys.argv[2:]
from attention_cases import make_view, queries
from kernels import cpu
for isa in ("avx512", "avx2", "baseline"):
    try:
        backend = cpu.Library(sys.argv[1], threads=2, isa=isa)
    except ValueError:
        continue
    for format, head_dim in [
        *(("int4c", d) for d in (48, 64, 80, 128, 256)),
        *(("k8v4", 80), ("int8", 64), ("int8", 128), ("affine4", 32), ("affine4", 128)),
    ]:
        for batch, heads, num_queries, size in ((1, 2, 1, 1.0), (2, 18, 3, 1e6), (1, 8, 16, 1e-6)):
            view = make_view(3, head_dim=head_dim, batch=batch, format=format)
            q = queries(heads, num_queries, head_dim, size=size, batch=batch)
            out = backend.decode_attention(q, view, 1.0)
            assert not mx.any(mx.isnan(out))
        for x in (mx.random.normal((2, 256, head_dim)), mx.full((2, 256, head_dim), mx.nan)):
            for dtype in (mx.float32, mx.float16, mx.bfloat16):
                tiles = backend.encode(x.astype(dtype), x * mx.inf, format)
                mx.eval(backend.decode(tiles, head_dim, dtype, format))
    for window in (3, 700):
        tail = make_view(0, num_tail=1500, num_sinks=0)
        view = type(tail)(tail.sinks_k, tail.sinks_v, tail.tiles, 0, tail.tail_k, tail.tail_v, window=window)
        backend.decode_attention(queries(2, 2, 64), view, 1.0)
    for num_queries, num_tokens, size in ((1, 1, 1.0), (70, 300, 1e6)):
        k = mx.random.normal((1, 2, num_tokens, 64))
        out = backend.prefill_attention(queries(6, num_queries, 64, size=size), k, k, 1.0)
        assert not mx.any(mx.isnan(out))
print("done")
"""


OVERFLOW = """
import sys
sys.path[:0] = sys.argv[2:]
from dataclasses import replace
from attention_cases import make_view, queries
from kernels import cpu
view = replace(make_view(0, num_sinks=0), window=-(2**31))
cpu.Library(sys.argv[1], threads=1).decode_attention(queries(2, 1, 64), view, 1.0)
"""


def test_the_code_has_no_undefined_behaviour(tmp_path):
    """Built so that undefined behaviour is a trap, then run over a sweep in a process of its own.

    A window that overflows an integer shows that the trap is set."""
    flags = ("-O1", "-fsanitize=undefined", "-fno-sanitize=alignment,vptr,function")
    path = build.build(build.compilers()[0], tmp_path, (*flags, "-fsanitize-trap=undefined"))
    here = str(build.SOURCES.parent.parent)

    def run(program):
        command = [sys.executable, "-c", program, str(path), here, f"{here}/tests/kernels"]
        return subprocess.run(command, capture_output=True, text=True)

    assert run(OVERFLOW).returncode in (-signal.SIGILL, -signal.SIGTRAP)
    swept = run(UNDEFINED)
    assert (swept.returncode, swept.stdout) == (0, "done\n"), swept.stderr


# ---- building ----


def test_every_compiler_there_is_makes_a_library_that_works(tmp_path):
    view, q = make_view(2), queries(4, 1, 64)
    for compiler in build.compilers():
        backend = cpu.Library(build.build(compiler, tmp_path))
        out = backend.decode_attention(q, view, 0.125)
        rounding.assert_within_contract(out, rounding.cached_attention(q, view, 0.125), compiler)


def test_two_processes_that_build_at_once_build_once_and_both_load_it(tmp_path):
    program = (
        "import sys; from pathlib import Path; from kernels import cpu; from kernels.cpu import build;"
        "path = build.library(Path(sys.argv[1])); cpu.Library(path); print(path, path.stat().st_ino)"
    )
    folder = tmp_path / "100 %20 é"  # LLVM writes digits over each % of a path that it is given
    command = [sys.executable, "-c", program, str(folder)]
    root = build.SOURCES.parent.parent
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    first, second = (process.communicate()[0] for process in both)
    assert first == second != ""
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_a_folder_that_cannot_be_written_is_a_build_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(build.BuildError, match="cannot build in"):
        build.library(blocked / "build")


def test_a_compiler_that_fails_is_a_build_error_with_its_words(tmp_path):
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.library(tmp_path, ["-fno-such-flag", "-Werror"])
    assert not list(tmp_path.glob("*.so"))


def test_without_a_compiler_attention_runs_on_plain_operations_after_one_warning(monkeypatch, tmp_path):
    view, q = make_view(2), queries(4, 1, 64)
    monkeypatch.setattr(build, "compilers", list)
    monkeypatch.setattr(build.platformdirs, "user_cache_path", lambda name: tmp_path)
    cpu.library.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outs = [kernels.decode_attention(q, view, 0.125) for _ in range(3)]
            kernels.decode(kernels.encode(*codec.decode(view.tiles, 64)), 64)
    finally:
        cpu.library.cache_clear()
    (warning,) = caught
    assert "slower" in str(warning.message)
    assert "no C++ compiler" in str(warning.message)
    assert "Install the ziglang package" in str(warning.message)
    assert all(mx.array_equal(out, unfused.decode_attention(q, view, 0.125)) for out in outs)


@pytest.mark.parametrize("format", FORMATS)
def test_the_library_is_what_the_package_uses_on_the_cpu(format):
    view, q = make_view(2, format=format), queries(4, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = kernels.decode_attention(q, view, 0.125)
    assert mx.array_equal(out, cpu.library().decode_attention(q, view, 0.125))
    k, v = codec.decode(view.tiles, 64, format=format)
    assert mx.array_equal(kernels.encode(k, v, format), cpu.library().encode(k, v, format))
    for ours, theirs in zip(
        kernels.decode(view.tiles, 64, format=format),
        cpu.library().decode(view.tiles, 64, format=format),
        strict=True,
    ):
        assert mx.array_equal(ours, theirs)
