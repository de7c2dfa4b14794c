# ruff: noqa: E501
"""What the check refuses and accepts, and that accepted language means what it means in Metal."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.emulator import BFloat16, MetalKernel
from tests.metal.sample_kernels import ELEMENTWISE, run_one

rng = np.random.default_rng(0)

# Source, header.
REJECTED = [
    (
        "matrix m; y[0] = x[0];",
        "#include <metal_stdlib>\nusing namespace metal;\nusing matrix = simdgroup_matrix<float, 8, 8>;\n",
    ),
    ("float4 v = int4(1); y[0] = v.x;", ""),
    ("uint4 v = int4(1); y[0] = v.x;", ""),
    ("float2 v = float4(1).xyzw; y[0] = v.x;", ""),
    ("float4 v = float4(1, 2, 3); y[0] = v.x;", ""),
    ("y[0] = f(3);", "inline float f(int n) { return n ? n * f(n - 1) : 1; }\n"),
    ("int n = x_shape[0]; float a[n]; y[0] = a[0];", ""),
    ("threadgroup float s[4]; device float* p = s; p[0] = 1;", ""),
    ("if (x[0] > 0) { threadgroup float s[4]; s[0] = 1; }", ""),
    ("static int c = 0; y[0] = c;", ""),
    ("y[0] = std::max(1, 2);", ""),
    ("y[0] = undeclared(1.0);", ""),
    ("float4 v = 1; y[0] = v.s0;", ""),
    ("float4 v = 1; y[0] = v.lo.x;", ""),
    ("const constant float* p = x; y[0] = p[0];", ""),
    ("device float* p = x; y[0] = p[0];", ""),
    ("y[0] = simd_sum(bfloat4(1)).x;", ""),
    ("ulong u = 1; y[0] = simd_sum(u);", ""),
    ("y[0] = exp(1);", ""),
    ("y[0] = max(1u, 2);", ""),
    ("float a = 1; float* p = &a; y[0] = *p;", ""),
    ("y[0] = f();", "inline uint f() { return thread_position_in_grid.x; }\n"),
    ("bfloat b = bfloat(1.0f); half h = b; y[0] = h;", ""),
    ("half h = 1; bfloat b = h; y[0] = b;", ""),
    ("long double d = 1; y[0] = d;", ""),
    ("try { y[0] = 1; } catch (...) {}", ""),
    ("threadgroup_barrier(); y[0] = 1;", ""),
    ("y[0] = f(x);", "float f(device float* p) { return p[0]; }\n"),
    ("y[0] = ((float*)y)[1];", ""),
    ("threadgroup float s[4]; y[0] = f(s);", "float f(const device float* p) { return p[0]; }\n"),
]
ACCEPTED = [
    ("float4 v = 1.0f; y[0] = v.x;", ""),
    ("half h = 1.0f; y[0] = h * 2.0f;", ""),
    ("float4 v = float4(half4(1.0h)); v = max(v, 0.0f); y[0] = v.x;", ""),
    ("auto l = [&](float q) { return q * x[0]; }; y[0] = l(2.0);", ""),
    ("constexpr int N = 3; float a[N] = {0}; y[0] = a[2];", ""),
    ("uint2 u = thread_position_in_grid.xy; y[0] = u.y;", ""),
    ("using V = vec<float, 4>; V v = V(1, 2, 3, 4); y[0] = v.w;", ""),
    ("float4 v = float4(1); thread float* p = (thread float*)&v; y[0] = p[1];", ""),
    ("threadgroup float4 s[8]; s[0] = float4(1); y[0] = s[0].x;", ""),
    ("packed_float3 p = packed_float3(1, 2, 3); y[0] = p.x;", ""),
    ("y[0] = (x[0] > 0) ? 1.0 : half(2.0);", ""),
    ("float a; float b = modf(x[0], a); y[0] = a + b;", ""),
    ("int e; y[0] = frexp(x[0], e);", ""),
    ("y[0] = float(as_type<half2>(1u).x);", ""),
    ("uint4 v = uint4(1) << 2u; v >>= uint4(1, 2, 3, 4); y[0] = v.x & 3u;", ""),
    ("y[0] = fma(x[0], 2.0f, 1.0f) + mix(1.0f, 2.0f, 0.5f) + sign(x[0]) + pow(2.0f, x[0]);", ""),
    ("int2 a(1, 2); y[0] = a.y;", ""),
    ("y[0] = f(y + 1);", "template <typename P> float f(P p) { return p[0]; }\n"),
]
# Accepted by Metal, refused here: write them otherwise.
TOO_STRICT = [
    ("uint4 k = {1, 2, 3}; y[0] = k.x;", ""),
    ("bool4 b = float4(1) > float4(0); y[0] = b.x;", ""),
    ("y[0] = f(1.0f);", "inline float f(const thread float& a) { return a; }\n"),
    ("y[0] = f({1u, 2u, 3u});", "inline float f(uint3 a) { return a.x; }\n"),
    ("float4x4 m; y[0] = m[0][0];", ""),
]


def refusals(source, header):
    kernel = MetalKernel("g", ["x"], ["y"], source, header)
    return kernel.program([np.zeros(64, np.float32)], [(64,)], [mx.float32], (32, 1, 1), (32, 1, 1)).check()


@pytest.mark.parametrize(("source", "header"), REJECTED + TOO_STRICT)
def test_refused(source, header):
    assert refusals(source, header)


@pytest.mark.parametrize(("source", "header"), ACCEPTED)
def test_accepted(source, header):
    assert not refusals(source, header)


def test_the_source_is_what_mlx_generates():
    kernel = MetalKernel("g", ["x", "n"], ["y"], ELEMENTWISE)
    inputs = [np.zeros(9, np.float32), np.zeros(1, np.float32)]
    text = kernel.program(inputs, [(9,)], [mx.float16], (9, 1, 1), (9, 1, 1), [("T", mx.float16)]).msl
    assert "const device float* x [[buffer(0)]]" in text
    assert "const constant float* n [[buffer(1)]]" in text
    assert "device float16_t* y [[buffer(2)]]" in text


FEATURES_HEADER = """
#include <metal_stdlib>
using namespace metal;
constant constexpr float TABLE[4] = {0.5, 1.0, 1.5, 2.0};
typedef vec<float, 4> f4;
struct Block {                                  // as a quantised block in device memory
  half scale;
  uchar code[6];
  float get(int i) const device { return float(scale) * float(code[i]); }
  float get(int i) const thread { return float(scale) * float(code[i]); }
};
struct Acc {
  float m, l;
  Acc() : m(0), l(1) {}
  Acc(float a) : m(a), l(0) {}
  Acc merged(Acc o, float by = 1.0) const { Acc r; r.m = m + o.m * by; r.l = l + o.l; return r; }
  float operator()(float s) { m += s; return m; }
  void reset(thread float& was) { was = m; m = 0; }
};
template <typename T> inline T twice(T x) { return T(2) * x; }
template <typename T, int N> inline T dotn(const threadgroup T* a, const thread T* b) {
  T s = 0;
  #pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) s += a[i] * b[i];
  return s;
}
inline void bump(thread float& x, float by = 1.0) { x += by; }
inline float4 widen(half4 h) { return float4(h); }
inline float pick(int k) { switch (k) { case 0: return 1.0; case 1: return 2.0; default: return 0.5; } }
"""
FEATURES = """
  uint i = thread_position_in_grid.x;
  threadgroup float buf[32], acc[4];
  threadgroup atomic_uint count;
  buf[i] = z[i];
  if (i < 4) acc[i] = 0;
  if (i == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  const device Block* blocks = (const device Block*)x;
  Block b = blocks[i];                            // copy out of device memory
  float r = b.get(1) + blocks[i].get(2);
  float4 v = float4(1.0, float2(2.0, 3.0), z[i]);
  v.xy = v.yx; v *= 2.0; f4 u = f4(v.wzyx); r += dot(u, v);
  half4 h = half4(v); r += widen(h).x + float4(h).y + float(h.z);
  int4 q = int4(v); uint4 m = uint4(q) & 0xf; r += q.x + m.w;                    // value conversion, not a bit cast
  int4 q2 = (int4)v; r += q2.y; r += static_cast<float4>(q).z;
  r += as_type<float>(as_type<uint>(z[i]) & 0x7fffffffu);
  float loc[4] = {1, 2, 3, 4};
  r += dotn<float, 4>(buf, loc); bump(r); bump(r, 0.5);
  r += TABLE[i % 4] + twice(0.25) + pick(i % 3) + twice(int(3));
  r += metal::select(1.0f, 2.0f, i > 5) + clamp(z[i], 0.0f, 1.0f) + max(1.0h, half(z[i])) + popcount(i) + abs(int(i) - 8) + select(v, u, v > u).x;
  Acc p, q3 = Acc(2.0);
  float was; r += p.merged(q3).merged(q3, 0.5).m + Acc(1.0).merged(p).l + q3(1.0); q3.reset(was); r += was;      // 3 + 1 + 3 + 3
  device float4* out4 = (device float4*)(y + i * 4);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  r += atomic_load_explicit(&count, memory_order_relaxed);
  *out4 = float4(r, metal::fast::exp2(z[i]), (float)bfloat(z[i]), metal::precise::rsqrt(2.0 + z[i] * z[i]));
"""


def test_language_features():
    z = rng.standard_normal(32).astype(np.float32)
    blk = np.zeros(32, np.dtype([("s", np.float16), ("c", np.uint8, 6)]))
    blk["s"], blk["c"] = rng.standard_normal(32), rng.integers(0, 255, (32, 6))
    y = run_one(
        FEATURES,
        [blk.view(np.uint8).reshape(-1), z],
        (32, 4),
        mx.float32,
        (32, 1, 1),
        (32, 1, 1),
        header=FEATURES_HEADER,
    )
    i = np.arange(32)
    scales = blk["s"].astype(np.float32)
    v = np.stack([np.full(32, 4.0), np.full(32, 2.0), np.full(32, 6.0), 2 * z], 1).astype(np.float32)
    u = v[:, ::-1]
    h = v.astype(np.float16).astype(np.float32)
    q = v.astype(np.int32)
    r = scales * blk["c"][:, 1] + scales * blk["c"][:, 2] + (u * v).sum(1) + h[:, 0] + h[:, 1] + h[:, 2]
    r = r + q[:, 0] + (q[:, 3] & 0xF) + q[:, 1] + q[:, 2] + np.abs(z) + (z[:4] * [1, 2, 3, 4]).sum() + 1.5
    r = r + np.array([0.5, 1, 1.5, 2])[i % 4] + 0.5 + np.array([1, 2, 0.5])[i % 3] + 6
    r = (
        r
        + np.where(i > 5, 2, 1)
        + np.clip(z, 0, 1)
        + np.maximum(1, z.astype(np.float16))
        + [bin(k).count("1") for k in i]
        + np.abs(i - 8)
        + np.where(v > u, u, v)[:, 0]
        + 32
        + 10
    )
    assert np.allclose(y[:, 0], r, rtol=1e-4)
    assert np.allclose(y[:, 1], np.exp2(z))
    assert np.allclose(y[:, 2], BFloat16(z).float())
    assert np.allclose(y[:, 3], 1 / np.sqrt(2 + z * z))
