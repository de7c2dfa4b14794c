"""Correct kernels run without findings and give what they should, in any order of threads."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.emulator import BFloat16, MetalError, MetalKernel, Options
from tests.metal.sample_kernels import ELEMENTWISE, MATMUL, ROW_SUM, Attention, run_one

rng = np.random.default_rng(0)
DTYPES = [(mx.float32, np.float32), (mx.float16, np.float16), (mx.bfloat16, None)]


@pytest.fixture(scope="module")
def attention():
    return Attention()


@pytest.mark.parametrize(("dtype", "numpy_dtype"), DTYPES)
def test_elementwise(dtype, numpy_dtype):
    x = rng.standard_normal(1003).astype(np.float32)
    given = x.astype(numpy_dtype) if numpy_dtype else BFloat16(x)
    values = given.astype(np.float32) if numpy_dtype else given.float()
    inputs = [given, np.array([2.0], np.float32)]
    template = (("T", dtype),)
    y = run_one(ELEMENTWISE, inputs, x.shape, dtype, (1003, 1, 1), (256, 1, 1), ("x", "n"), template=template)
    tolerance = {mx.float32: 1e-6, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype]
    np.testing.assert_allclose(y.astype(np.float32), 2 * np.exp(values), rtol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_row_sum(seed):
    x = rng.standard_normal((20, 777)).astype(np.float32)
    options = Options(seed=seed)
    y = run_one(ROW_SUM, [x], (20,), mx.float32, (20 * 256, 1, 1), (256, 1, 1), options=options)
    np.testing.assert_allclose(y, x.sum(1), atol=1e-4)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 31, 33, 100, 256, 300])
def test_split_attention(attention, dim, tokens):
    for heads, rows, splits, seed in ((2, 4, 3, 0), (1, 1, 1, 1), (3, 2, 8, 2)):
        out, expected = attention(tokens, dim, heads, rows, splits, options=Options(seed=seed))
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("extreme", [-20, 20])
def test_split_attention_with_extreme_scores(attention, extreme):
    out, expected = attention(33, 64, 2, 3, 5, capacity=40, extreme=extreme)
    np.testing.assert_allclose(out, expected, atol=1e-3)


def test_many_schedules_change_nothing(attention):
    x = rng.standard_normal((3, 500)).astype(np.float32)
    kernel = MetalKernel("r", ["x"], ["y"], ROW_SUM)
    for seed in range(100):
        options = Options(seed=seed)
        (y,) = kernel([x], [(3,)], [mx.float32], (3 * 256, 1, 1), (256, 1, 1), options=options)
        np.testing.assert_allclose(y, x.sum(1), atol=1e-4)
        out, expected = attention(20 + seed, (64, 128)[seed % 2], 2, 4, 3, options=options)
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(32, 16, 32), (40, 50, 70), (1, 1, 1), (64, 33, 96)])
def test_matrix_product(dtype, numpy_dtype, m, k, n):
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    given = [x.astype(numpy_dtype) if numpy_dtype else BFloat16(x) for x in (a, b)]
    a, b = (x.astype(np.float32) if numpy_dtype else x.float() for x in given)
    kernel = MetalKernel("mm", ["a", "b"], ["out"], MATMUL, "#include <metal_simdgroup_matrix>\n")
    grid = ((n + 31) // 32 * 128, (m + 31) // 32, 1)
    options = Options(seed=m % 3)
    (c,) = kernel(given, [(m, n)], [mx.float32], grid, (128, 1, 1), [("T", dtype)], options=options)
    np.testing.assert_allclose(c, a @ b, atol=1e-4)


def test_matrix_forms():
    a = rng.standard_normal((8, 8)).astype(np.float32)
    source = """
      simdgroup_float8x8 m, t, d = simdgroup_float8x8(3.0f), p;
      simdgroup_load(m, x, 8);
      simdgroup_load(t, x, 8, ulong2(0, 0), true);
      simdgroup_multiply(p, m, t);
      simdgroup_store(p, y, 8);
      simdgroup_store(m, y + 64, 8, ulong2(0, 0), true);
      simdgroup_multiply(p, m, d);
      simdgroup_store(p, y + 128, 8);
    """
    header = "#include <metal_simdgroup_matrix>\n"
    y = run_one(source, [a], (3, 8, 8), mx.float32, (32, 1, 1), (32, 1, 1), header=header)
    np.testing.assert_allclose(y[0], a @ a.T, atol=1e-5)
    np.testing.assert_array_equal(y[1], a.T)
    np.testing.assert_allclose(y[2], 3 * a, atol=1e-6)


SIMD_FUNCTIONS = """
  uint i = thread_position_in_grid.x; int v = x[i]; device int* o = y + i * 20;
  o[0] = simd_sum(v); o[1] = simd_max(v); o[2] = simd_min(v); o[3] = simd_shuffle_xor(v, 5);
  o[4] = simd_shuffle_down(v, 3); o[5] = simd_shuffle_up(v, 3); o[6] = simd_broadcast(v, 7);
  o[7] = simd_prefix_inclusive_sum(v); o[8] = simd_prefix_exclusive_sum(v);
  o[9] = simd_shuffle(v, ushort((i * 7) % 32)); o[10] = simd_any(v == x[3]); o[11] = simd_all(v > -60);
  o[12] = quad_sum(v); o[13] = simd_shuffle_rotate_down(v, 4); o[14] = simd_shuffle_and_fill_up(v, -1, 2);
  o[15] = simd_and(v); o[16] = quad_broadcast(v, 2); o[17] = int(ulong(simd_ballot(v > 0)) & 0xffff);
  o[18] = simd_shuffle_and_fill_down(v, -1, 2); o[19] = quad_shuffle_xor(v, 1);
"""


def test_simd_functions():
    x = rng.integers(-50, 50, 32).astype(np.int32)
    y = run_one(SIMD_FUNCTIONS, [x], (32, 20), mx.int32, (32, 1, 1), (32, 1, 1))
    i = np.arange(32)
    expected = [
        *(x.sum(), x.max(), x.min(), x[i ^ 5]),
        *(np.where(i + 3 < 32, x[(i + 3) % 32], x), np.where(i >= 3, x[i - 3], x), x[7]),
        *(x.cumsum(), x.cumsum() - x, x[(i * 7) % 32], 1, 1),
        *(x.reshape(8, 4).sum(1).repeat(4), x[(i + 4) % 32], np.where(i >= 2, x[i - 2], -1)),
        *(np.bitwise_and.reduce(x), x[i // 4 * 4 + 2], sum(1 << int(k) for k in i[:16] if x[k] > 0)),
        *(np.where(i + 2 < 32, x[(i + 2) % 32], -1), x[i ^ 1]),
    ]
    for column, values in enumerate(expected):
        assert (y[:, column] == values).all(), column


def test_reductions_over_the_active_lanes():
    """strict=False: Metal's own rule."""
    x = np.arange(64, dtype=np.float32)
    options = Options(strict=False)
    source = """
      uint i = thread_position_in_grid.x;
      float s = 0;
      if (thread_index_in_simdgroup < 16) s = simd_sum(x[i]);
      y[i] = s;
    """
    y = run_one(source, [x], (64,), mx.float32, (64, 1, 1), (64, 1, 1), options=options)
    halves = x.reshape(2, 32)[:, :16].sum(1).repeat(32)
    np.testing.assert_array_equal(y, np.where(np.arange(64) % 32 < 16, halves, 0))
    source = "uint i = thread_position_in_grid.x; y[i] = simd_sum(x[i]);"
    y = run_one(source, [x[:40]], (40,), mx.float32, (40, 1, 1), (40, 1, 1), options=options)
    np.testing.assert_array_equal(y, np.where(np.arange(40) < 32, x[:32].sum(), x[32:40].sum()))


def test_denormals_are_flushed_as_apple_does():
    x = np.array([1e-40] * 32, np.float32)
    source = "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] * 1.5;"
    shape = ((32,), mx.float32, (32, 1, 1), (32, 1, 1))
    assert run_one(source, [x], *shape).max() == 0
    assert run_one(source, [x], *shape, options=Options(flush_denormals=False)).max() > 0
    assert np.float32(1e-40) * np.float32(1.5) > 0  # the caller's mode is back


def test_strided_and_scalar_inputs():
    a = rng.standard_normal((6, 40)).astype(np.float32)[:, ::2]
    source = """
      uint i = thread_position_in_grid.x;
      y[i] = x[(i / 20) * x_strides[0] + (i % 20) * x_strides[1]] * z + x_ndim + x_shape[1];
    """
    for made_with in ({"ensure_row_contiguous": False}, {}):
        inputs = [a, np.float32(3.0)]
        y = run_one(source, inputs, (120,), mx.float32, (120, 1, 1), (40, 1, 1), made_with=made_with)
        np.testing.assert_allclose(y.reshape(6, 20), a * 3 + 22, rtol=1e-6)


def test_a_late_start_of_an_input_shows_alignment_assumptions():
    """An MLX slice reaches the kernel with any element offset: vector loads must survive it."""
    source = "uint i = thread_position_in_grid.x; y[i] = ((const device float4*)x)[i].y;"
    x = rng.standard_normal(64).astype(np.float32)
    shape = ((16,), mx.float32, (16, 1, 1), (16, 1, 1))
    np.testing.assert_array_equal(run_one(source, [x], *shape), x[1::4])
    with pytest.raises(MetalError, match="misaligned"):
        run_one(source, [x], *shape, offsets={"x": 1})


def test_a_barrier_orders_the_memory_it_names():
    source = """
      uint i = thread_position_in_grid.x;
      y[i] = x[i];
      threadgroup_barrier(mem_flags::%s);
      y[i + 64] = y[63 - i];
    """
    x = rng.standard_normal(64).astype(np.float32)
    shape = ((128,), mx.float32, (64, 1, 1), (64, 1, 1))
    np.testing.assert_array_equal(run_one(source % "mem_device", [x], *shape)[64:], x[::-1])
    with pytest.raises(MetalError, match="race"):
        run_one(source % "mem_threadgroup", [x], *shape)


def test_atomic_outputs():
    x = rng.integers(0, 10, 500).astype(np.int32)
    source = "atomic_fetch_add_explicit(&y[x[thread_position_in_grid.x]], 1, memory_order_relaxed);"
    call = {"init_value": 0, "options": Options(seed=1), "made_with": {"atomic_outputs": True}}
    y = run_one(source, [x], (10,), mx.int32, (500, 1, 1), (64, 1, 1), **call)
    np.testing.assert_array_equal(y, np.bincount(x, minlength=10))


def test_small_dtypes():
    x = rng.integers(0, 255, 300).astype(np.uint8)
    shape = ((300, 1, 1), (64, 1, 1))
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] > 100;"
    np.testing.assert_array_equal(run_one(source, [x], (300,), mx.bool_, *shape), x > 100)
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] + 1;"
    np.testing.assert_array_equal(run_one(source, [x], (300,), mx.uint8, *shape), x + 1)


CONVERGENT = """
  uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  threadgroup float s[4];
  float v = x[i], r = 0;
  if (lane < 16) v = v * 2.0; else v = v + 1.0;              // a divergent value, then a collective operation
  r += simd_sum(v);
  if (sg % 2 == 0) r += simd_sum(v * 2.0); else r += simd_sum(v * 3.0);     // uniform branch: two call sites
  #pragma clang loop unroll(full)
  for (int k = 0; k < 4; k++) { float t = lane & (1u << k) ? v : 0.0; r += simd_sum(t); }
  for (uint k = 0; k <= sg; k++) r += helper(v, k);           // trip count differs between simdgroups only
  switch (sg) {
    case 0: r += simd_max(v); break;
    case 1: r += simd_min(v); break;
    default: r += simd_shuffle_xor(v, 1) * 0.0;
  }
  for (int k = 0; k < 3; k++) {
    if (lane == 0) s[sg] = r;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float t = s[(sg + 1) % 4];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    r = t + simd_broadcast(v, k);
    if (k == 1 && x[0] < -1e30) break;                        // uniform early exit
  }
  y[i] = r;
"""
HELPER = """
inline float helper(float v, uint k) {
  using namespace metal;
  return k % 2 ? simd_sum(v) * 0.5f : simd_max(v);
}
"""


@pytest.mark.parametrize("seed", range(8))
def test_converged_code_is_not_called_divergent(seed):
    x = rng.standard_normal(128).astype(np.float32)
    options = Options(seed=seed)
    y = run_one(CONVERGENT, [x], (128,), mx.float32, (128, 1, 1), (128, 1, 1), header=HELPER, options=options)
    lane = np.arange(32)
    v = np.where(lane < 16, x.reshape(4, 32) * 2, x.reshape(4, 32) + 1)
    r = np.zeros(4)
    for g in range(4):
        r[g] = v[g].sum() * (1 + (2 if g % 2 == 0 else 3)) + sum(
            v[g][(lane >> k & 1) == 1].sum() for k in range(4)
        )
        r[g] += sum(v[g].sum() * 0.5 if k % 2 else v[g].max() for k in range(g + 1))
        r[g] += {0: v[g].max(), 1: v[g].min()}.get(g, 0)
    for k in range(3):
        r = np.roll(r, -1) + v[:, k]
    np.testing.assert_allclose(y.reshape(4, 32), np.repeat(r[:, None], 32, 1), rtol=1e-4, atol=1e-3)
