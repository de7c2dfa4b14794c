"""Causal attention over dense keys and values, against float64, with every instruction set there is here."""

import ctypes
import mmap
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels import cpu
from kernels.cpu import build
from tests.kernels import rounding


@cache
def backends():
    """The library once per instruction set that this processor has."""
    found = []
    for isa in ("avx512", "avx2", "baseline"):
        try:
            found.append(cpu.Library(build.library(), threads=2, isa=isa))
        except ValueError:
            assert isa != "baseline"
    return found


def arrays(num_queries, num_tokens, head_dim=64, num_kv_heads=1, group=3, size=1.0):
    mx.random.seed(num_tokens + num_queries)
    q = size * mx.random.normal((1, group * num_kv_heads, num_queries, head_dim))
    k, v = (mx.random.normal((1, num_kv_heads, num_tokens, head_dim)) for _ in "kv")
    mx.eval(q, k, v)
    return q, k, v


def assert_close(q, k, v, scale):
    exact = rounding.dense_attention(q, k, v, scale)
    for backend in backends():
        ours = backend.prefill_attention(q, k, v, scale)
        assert ours.dtype == mx.float32
        assert ours.shape == q.shape
        rounding.assert_within_contract(ours, exact, backend.isa)


@pytest.mark.parametrize("num_queries", [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 200, 256, 300])
@pytest.mark.parametrize("older", [0, 1, 63, 129, 700])
def test_it_agrees_with_float64(num_queries, older):
    assert_close(*arrays(num_queries, num_queries + older), 0.125)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("num_queries", "num_tokens"), [(5, 5), (37, 130), (66, 333)])
def test_every_head_size_and_group(head_dim, group, num_queries, num_tokens):
    q, k, v = arrays(num_queries, num_tokens, head_dim, num_kv_heads=2, group=group)
    assert_close(q, k, v, head_dim**-0.5)


def test_few_queries_over_33000_keys():
    """Past what a 16-bit index reaches."""
    assert_close(*arrays(5, 33_000), 0.125)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1e2, 1e4, 1e8])
def test_extreme_scores(size):
    assert_close(*arrays(70, 333, size=size), 0.125)


def test_a_score_that_wins_by_far_gives_its_value():
    q, k, v = arrays(40, 200)
    k = mx.where(mx.arange(200)[:, None] == 17, 1e3 * q[:, :1, :1], 0 * k)
    for backend in backends():
        out = backend.prefill_attention(mx.broadcast_to(q[:, :1, :1], q.shape), k, v, 1.0)
        assert mx.array_equal(out, mx.broadcast_to(v[:, :, 17:18], q.shape)), backend.isa


def test_equal_keys_average_the_values_seen():
    q, k, v = arrays(300, 300)
    means = np.cumsum(rounding.wide(v), axis=2) / np.arange(1, 301)[:, None]
    exact = rounding.dense_attention(q, 0 * k, v, 0.125)
    assert np.allclose(exact.truth, means, rtol=0, atol=1e-14)
    assert_close(q, 0 * k, v, 0.125)


def test_later_keys_change_nothing():
    q, k, v = arrays(100, 180)
    for backend in backends():
        out = backend.prefill_attention(q, k, v, 0.125)
        later = mx.arange(180)[:, None] > 80 + 40
        changed = backend.prefill_attention(q, mx.where(later, 7, k), mx.where(later, -9, v), 0.125)
        assert mx.array_equal(out[:, :, :41], changed[:, :, :41]), backend.isa
        assert not mx.any(mx.all(out[:, :, 41:] == changed[:, :, 41:], axis=-1)), backend.isa


def test_slices_are_read_in_place_and_nothing_beside_them():
    """The buffer that a layer reserves holds NaN past the tokens so far; the queries lie token by token."""
    q, k, v = arrays(70, 300, num_kv_heads=2)
    room = mx.full((1, 2, 9, 64), mx.nan)

    def reserved(x):
        return mx.concatenate([room, x, room], axis=2)[:, :, 9:309]

    by_token = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)
    for backend in backends():
        out = backend.prefill_attention(by_token, reserved(k), reserved(v), 0.125)
        assert mx.array_equal(out, backend.prefill_attention(q, k, v, 0.125)), backend.isa


def test_an_array_whose_last_axis_is_strided_is_read_right():
    q, k, v = arrays(20, 90)
    turned = [mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)]
    for backend in backends():
        out = backend.prefill_attention(*turned, 0.125)
        assert mx.array_equal(out, backend.prefill_attention(q, k, v, 0.125)), backend.isa


@pytest.mark.parametrize("threads", [2, 7])
def test_any_number_of_threads_gives_the_same_bits(threads):
    q, k, v = arrays(300, 700, num_kv_heads=3)
    for backend in backends():
        one = cpu.Library(build.library(), threads=1, isa=backend.isa).prefill_attention(q, k, v, 0.125)
        many = cpu.Library(build.library(), threads=threads, isa=backend.isa)
        for _ in range(5):
            assert mx.array_equal(many.prefill_attention(q, k, v, 0.125), one), backend.isa


@pytest.mark.parametrize("step", [1, 17, 50, 64, 256])
def test_however_the_queries_are_cut_into_calls_they_give_the_same_bits(step):
    q, k, v = arrays(300, 420, head_dim=80, num_kv_heads=1)
    for backend in backends():
        whole = backend.prefill_attention(q, k, v, 0.1)
        for a in range(0, 300, step):
            b = min(a + step, 300)
            end = 120 + b
            part = backend.prefill_attention(q[:, :, a:b], k[:, :, :end], v[:, :, :end], 0.1)
            assert mx.array_equal(part, whole[:, :, a:b]), (backend.isa, a)


def test_nothing_is_read_or_written_outside_the_arrays():
    """Every array ends at a page that may not be touched: one byte too far kills the process."""
    page = mmap.PAGESIZE
    fences = []

    def fenced(shape):
        size = 4 * int(np.prod(shape))
        inner = -(-size // page) * page
        fences.append(mmap.mmap(-1, inner + page))
        start = ctypes.addressof(ctypes.c_char.from_buffer(fences[-1]))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + inner), page, 0) == 0  # PROT_NONE
        strides = np.cumprod((1, *shape[:0:-1]))[:0:-1]
        return cpu._Tensor(start + inner - size, (ctypes.c_int64 * 3)(*map(int, strides)), 0)

    for backend in backends():
        for head_dim, num_queries, num_tokens in ((16, 1, 1), (80, 5, 7), (64, 67, 131), (128, 33, 256)):
            q, kv = (1, 6, num_queries, head_dim), (1, 2, num_tokens, head_dim)
            job = cpu._Prefill(*map(fenced, (q, q, kv, kv)), 6, 2, num_queries, num_tokens, head_dim, 0.1)
            assert backend._lib.longleaf_prefill(ctypes.byref(job), backend._set, 2) == 0


# ---- kernels.prefill_attention ----


def test_float32_on_the_cpu_goes_to_the_library(monkeypatch):
    q, k, v = arrays(20, 90)
    asked = []
    monkeypatch.setattr(kernels, "cpu_library", lambda: asked.append(1) or backends()[0])
    out = kernels.prefill_attention(q, k, v, 0.125)
    assert asked
    assert mx.array_equal(out, backends()[0].prefill_attention(q, k, v, 0.125))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_dtypes_take_mlx_s_way(dtype):
    q, k, v = (x.astype(dtype) for x in arrays(20, 90))
    out = kernels.prefill_attention(q, k, v, 0.125)
    assert out.dtype == dtype
    assert mx.array_equal(out, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"))


@pytest.mark.parametrize(("batch", "head_dim"), [(2, 64), (1, 72)])
def test_a_batch_and_an_uneven_head_size_take_mlx_s_way(batch, head_dim):
    q, k, v = (mx.repeat(x, batch, axis=0) for x in arrays(20, 90, head_dim))
    out = kernels.prefill_attention(q, k, v, 0.1)
    rounding.assert_within_contract(out, rounding.dense_attention(q, k, v, 0.1))


def test_without_a_library_mlx_does_it(monkeypatch):
    q, k, v = arrays(20, 90)
    monkeypatch.setattr(kernels, "cpu_library", lambda: None)
    out = kernels.prefill_attention(q, k, v, 0.125)
    assert mx.array_equal(out, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"))


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = arrays(20, 90, num_kv_heads=2)
    with pytest.raises(ValueError, match="do not fit keys"):
        kernels.prefill_attention(q[:, :5], k, v, 0.1)
    with pytest.raises(ValueError, match="do not fit keys"):
        kernels.prefill_attention(q[..., :32], k, v, 0.1)
    with pytest.raises(ValueError, match="do not fit keys"):
        kernels.prefill_attention(q, k, v[:, :, 1:], 0.1)
    with pytest.raises(ValueError, match="20 query tokens over 19 keys"):
        kernels.prefill_attention(q, k[:, :, :19], v[:, :, :19], 0.1)
