"""Small correct kernels, as a user of `mx.fast.metal_kernel` would write them: what bugs are planted in.

The attention here is a plain split-K draft over MLX's affine layout; the product's own is `kernels/metal`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal.emulator import MetalKernel, Options

ELEMENTWISE = """
  uint i = thread_position_in_grid.x;
  y[i] = T(metal::exp(float(x[i])) * n[0]);
"""

ROW_SUM = """
  threadgroup float part[32];
  uint i = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x, cols = x_shape[1];
  float s = 0.0;
  for (uint j = i; j < cols; j += threads_per_threadgroup.x) s += float(x[row * cols + j]);
  s = simd_sum(s);
  if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index_in_threadgroup == 0) {
    s = thread_index_in_simdgroup < simdgroups_per_threadgroup ? part[thread_index_in_simdgroup] : 0.0;
    s = simd_sum(s);
    if (thread_index_in_simdgroup == 0) y[row] = s;
  }
"""

# int4 split-K decode attention. One threadgroup: one KV head, one split, all R query rows of the head.
# Each simdgroup walks every NSG-th token of the split; a lane holds D/32 consecutive elements.
ATTN_HEADER = """
#include <metal_simdgroup>
using namespace metal;

// n consecutive 4-bit codes starting at element e of a packed row
template <int N>
inline void unpack4(const device uint32_t* row, uint e, float scale, float bias, thread float* out) {
  uint32_t w = row[e / 8] >> (4 * (e % 8));
  #pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    out[i] = fma(float((w >> (4 * i)) & 0xf), scale, bias);
  }
}
"""
ATTN_PARTIAL = """
  constexpr int E = D / 32;                       // elements per lane
  constexpr int W = D / 8, G = D / GROUP;         // words and groups per token
  const int tokens = length[0], splits = threadgroups_per_grid.y, cap = kq_shape[1];
  const int hk = threadgroup_position_in_grid.z, split = threadgroup_position_in_grid.y;
  const int lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const int chunk = (tokens + splits - 1) / splits, t0 = split * chunk, t1 = min(tokens, t0 + chunk);

  threadgroup float tg_m[NSG * R], tg_l[NSG * R];
  threadgroup float tg_o[NSG * R * D];

  float qr[R][E], o[R][E], m[R], l[R];
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < E; i++) {
      qr[r][i] = float(q[(hk * R + r) * D + lane * E + i]) * (scale[0] * M_LOG2E_F);
      o[r][i] = 0.0;
    }
    m[r] = -INFINITY; l[r] = 0;
  }
  for (int t = t0 + sg; t < t1; t += NSG) {
    const size_t at = size_t(hk) * cap + t;
    const int g = lane * E / GROUP;
    float k[E], v[E];
    unpack4<E>(kq + at * W, lane * E, float(ks[at * G + g]), float(kb[at * G + g]), k);
    unpack4<E>(vq + at * W, lane * E, float(vs[at * G + g]), float(vb[at * G + g]), v);
    #pragma clang loop unroll(full)
    for (int r = 0; r < R; r++) {
      float s = 0;
      for (int i = 0; i < E; i++) s = fma(qr[r][i], k[i], s);
      s = simd_sum(s);
      const float mn = max(m[r], s), f = fast::exp2(m[r] - mn), p = fast::exp2(s - mn);
      m[r] = mn; l[r] = l[r] * f + p;
      for (int i = 0; i < E; i++) o[r][i] = fma(p, v[i], o[r][i] * f);
    }
  }
  for (int r = 0; r < R; r++) {
    if (lane == 0) { tg_m[sg * R + r] = m[r]; tg_l[sg * R + r] = l[r]; }
    for (int i = 0; i < E; i++) tg_o[(sg * R + r) * D + lane * E + i] = o[r][i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = sg; r < R; r += NSG) {
    float mx = -INFINITY, sum = 0, acc[E];
    for (int i = 0; i < E; i++) acc[i] = 0;
    for (int s = 0; s < NSG; s++) mx = max(mx, tg_m[s * R + r]);
    for (int s = 0; s < NSG; s++) {
      const float w = mx == -INFINITY ? 0.0 : fast::exp2(tg_m[s * R + r] - mx);
      sum += w * tg_l[s * R + r];
      for (int i = 0; i < E; i++) acc[i] = fma(w, tg_o[(s * R + r) * D + lane * E + i], acc[i]);
    }
    const size_t row = size_t(hk * R + r) * splits + split;
    const float inv = sum > 0 ? 1.0 / sum : 0.0;
    for (int i = 0; i < E; i++) partial[row * D + lane * E + i] = acc[i] * inv;
    if (lane == 0) lse[row] = sum > 0 ? mx + metal::log2(sum) : -INFINITY;
  }
"""
ATTN_COMBINE = """
  constexpr int E = D / 32;
  const int splits = lse_shape[1], h = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;
  float m = -INFINITY;
  for (int s = lane; s < splits; s += 32) m = max(m, lse[h * splits + s]);
  m = simd_max(m);
  float sum = 0, acc[E];
  for (int i = 0; i < E; i++) acc[i] = 0;
  for (int s = 0; s < splits; s++) {
    const float w = fast::exp2(lse[h * splits + s] - m);
    sum += w;
    for (int i = 0; i < E; i++) acc[i] = fma(w, partial[(h * splits + s) * D + lane * E + i], acc[i]);
  }
  for (int i = 0; i < E; i++) out[h * D + lane * E + i] = T(acc[i] / sum);
"""

# C = A B: a 32x32 tile per threadgroup of 4 simdgroups, 8x8 matrices, tiles staged in threadgroup memory.
MATMUL = """
  constexpr int BM = 32, BN = 32, BK = 16, PAD = 4;
  threadgroup T As[BM * (BK + PAD)], Bs[BK * (BN + PAD)];
  const int M = a_shape[0], K = a_shape[1], N = b_shape[1];
  const uint tid = thread_index_in_threadgroup, sg = simdgroup_index_in_threadgroup;
  const int row0 = threadgroup_position_in_grid.y * BM, col0 = threadgroup_position_in_grid.x * BN;
  const int sm = (sg / 2) * 16, sn = (sg % 2) * 16;
  simdgroup_matrix<float, 8, 8> acc[2][2];
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k0 = 0; k0 < K; k0 += BK) {
    for (int e = tid; e < BM * BK; e += 128) {
      int r = e / BK, c = e % BK;
      As[r * (BK + PAD) + c] = (row0 + r < M && k0 + c < K) ? a[(row0 + r) * K + k0 + c] : T(0);
    }
    for (int e = tid; e < BK * BN; e += 128) {
      int r = e / BN, c = e % BN;
      Bs[r * (BN + PAD) + c] = (k0 + r < K && col0 + c < N) ? b[(k0 + r) * N + col0 + c] : T(0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int kk = 0; kk < BK; kk += 8) {
      simdgroup_matrix<T, 8, 8> A[2], B[2];
      for (int i = 0; i < 2; i++) simdgroup_load(A[i], As + (sm + 8 * i) * (BK + PAD) + kk, BK + PAD);
      for (int j = 0; j < 2; j++) simdgroup_load(B[j], Bs + kk * (BN + PAD) + sn + 8 * j, BN + PAD);
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(acc[i][j], A[i], B[j], acc[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int lane = thread_index_in_simdgroup, qid = lane / 4;
  const int fm = (qid & 4) + (lane / 2) % 4, fn = (qid & 2) * 2 + (lane % 2) * 2;
  for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) {
    thread auto& e = acc[i][j].thread_elements();
    const int r = row0 + sm + 8 * i + fm, c = col0 + sn + 8 * j + fn;
    if (r < M && c < N) out[r * N + c] = e.x;
    if (r < M && c + 1 < N) out[r * N + c + 1] = e.y;
  }
"""


def quantize4(x: np.ndarray, group: int) -> tuple[np.ndarray, ...]:
    """(..., D) → packed uint32 (..., D/8), scale, bias (..., D/group), and the values they stand for."""
    g = x.reshape(*x.shape[:-1], -1, group).astype(np.float32)
    lo, hi = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
    s = ((hi - lo) / 15 + 1e-8).astype(np.float16).astype(np.float32)
    b = lo.astype(np.float16).astype(np.float32)
    c = np.clip(np.round((g - b) / s), 0, 15).astype(np.uint32)
    deq = (c * s + b).reshape(x.shape)
    c = c.reshape(*x.shape[:-1], -1, 8)
    packed = (c << (4 * np.arange(8, dtype=np.uint32))).sum(-1).astype(np.uint32)
    return packed, s[..., 0].astype(np.float16), b[..., 0].astype(np.float16), deq


def attention_case(
    num_tokens: int, dim: int, heads: int, rows: int, capacity: int, group: int, seed: int, extreme: float
) -> tuple[Any, ...]:
    """q, quantised K and V, scale, expected output.

    extreme: all scores far from zero on its side, differently per head: an online softmax must not depend on
    where it starts. Scales past the last token are NaN.
    """
    r = np.random.default_rng(seed)
    q = r.standard_normal((heads * rows, dim)).astype(np.float32)
    k, v = r.standard_normal((2, heads, capacity, dim)).astype(np.float32)
    if extreme:
        k += 2
        sizes = np.linspace(1, abs(extreme), heads * rows)[:, None]
        q = (np.sign(extreme) * (np.abs(q) + 0.5) * sizes).astype(np.float32)
    keys, values = quantize4(k, group), quantize4(v, group)
    for a in (keys, values):
        a[1][:, num_tokens:] = np.nan
    scale = np.float32(dim**-0.5)
    s = (
        np.einsum("grd,gtd->grt", q.reshape(heads, rows, dim), keys[3][:, :num_tokens]).astype(np.float64)
        * scale
    )
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = np.einsum("grt,gtd->grd", p, values[3][:, :num_tokens]).reshape(heads * rows, dim)
    return q, keys, values, scale, expected


class Attention:
    """Both kernels of the draft, one of them perhaps with a bug in it."""

    def __init__(
        self, partial: str = ATTN_PARTIAL, combine: str = ATTN_COMBINE, header: str = ATTN_HEADER
    ) -> None:
        names = ["q", "kq", "ks", "kb", "vq", "vs", "vb", "scale", "length"]
        self.partial = MetalKernel("attn_partial", names, ["partial", "lse"], partial, header)
        self.combine = MetalKernel("attn_combine", ["partial", "lse"], ["out"], combine)

    def __call__(
        self,
        num_tokens: int,
        dim: int,
        heads: int,
        rows: int,
        splits: int,
        simdgroups: int = 4,
        capacity: int = 0,
        seed: int = 0,
        extreme: float = 0.0,
        options: Options = Options(),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Output and what it should be."""
        capacity = capacity or (num_tokens + 7) // 8 * 8
        q, k, v, scale, expected = attention_case(num_tokens, dim, heads, rows, capacity, 32, seed, extreme)
        partial, lse = self.partial(
            inputs=[q, *k[:3], *v[:3], np.array([scale]), np.array([num_tokens], np.int32)],
            template=[("D", dim), ("R", rows), ("NSG", simdgroups), ("GROUP", 32)],
            grid=(32 * simdgroups, splits, heads),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(heads * rows, splits, dim), (heads * rows, splits)],
            output_dtypes=[mx.float32, mx.float32],
            options=options,
        )
        (out,) = self.combine(
            inputs=[partial, lse],
            template=[("T", mx.float32), ("D", dim)],
            grid=(32, heads * rows, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(heads * rows, dim)],
            output_dtypes=[mx.float32],
            options=options,
        )
        return out, expected


def run_one(
    source: str,
    inputs: list[Any],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    names: tuple[str, ...] = ("x", "z", "w"),
    header: str = "",
    template: tuple[tuple[str, Any], ...] = (),
    made_with: dict[str, Any] | None = None,
    **call: Any,
) -> np.ndarray:
    """A kernel of one output, made and run."""
    kernel = MetalKernel("t", list(names[: len(inputs)]), ["y"], source, header, **(made_with or {}))
    return kernel(inputs, [shape], [dtype], grid, threadgroup, template, **call)[0]


def differs(y: np.ndarray, expected: np.ndarray) -> bool:
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    return not (np.abs(y - expected) <= 1e-3 * (1 + np.abs(expected))).all()


Case = Callable[[Options], tuple[np.ndarray, np.ndarray]]
"""Runs something under options: output and what it should be."""
