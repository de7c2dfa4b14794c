// Attention over the dense ends (sinks, tails): a CTA's share of the pieces, as one partial of its own.
//
// Layout: 16 tokens are one piece; a warp takes every (CTAs * NW)-th. K stands in A (16 tokens x 16 channels)
// and q in B for the scores; P stands in A (rows x tokens) and V in B for the values, so both are read from
// device memory as 16-byte rows. Channels are permuted alike in A and B, which changes no dot product.
// Accumulation: fp32; P is rounded to the input type. o stays in shared memory, not rotated until the merge.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int O_PITCH = D + 4;  // floats of a row of o in shared memory

// Out of line, so that arrays no 16-byte load fits do not swell the code of those it does.
template <class T, int COUNT>
__device__ __noinline__ uint4 gather(const T* p, i64 stride) {
  __align__(16) T x[8];
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = p[i * stride];
  return *(const uint4*)x;
}
template <class T>
__device__ __forceinline__ uint4 load8(const T* p, i64 stride, bool vectors) {
  return vectors ? *(const uint4*)p : gather<T, 8>(p, stride);
}
template <class T>
__device__ __forceinline__ uint2 load4(const T* p, i64 stride, bool vectors) {
  if (vectors) return *(const uint2*)p;
  const uint4 x = gather<T, 4>(p, stride);
  return make_uint2(x.x, x.y);
}
template <class T>
__device__ __forceinline__ void mma_dense(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (Same<T>::half) mma(d, a0, a1, a2, a3, b0, b1);
  else mma_bf16(d, a0, a1, a2, a3, b0, b1);
}
template <class T>
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  return Same<T>::half ? pack_half(lo, hi) : pack_bf16(lo, hi);
}

// One piece: tokens first..first+15 of k and v, of which those below `end` exist. b < 0: sinks, visible to all
// rows; else the tail of batch row b. m, l: of query columns 2t and 2t + 1; o: [row][O_PITCH].
template <class T, int NB>
__device__ __forceinline__ void dense_piece(const Call<T>& c, const Strided<T>& k, const Strided<T>& v, int h, int r0, int b, int first, int end,
                                            bool fresh, float (&m)[NB][2], float (&l)[NB][2], float* o) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, rows = c.rows();
  const bool kv = k.vectors(), vv = v.vectors(), qv = c.q.vectors();
  const uint4 zero4 = make_uint4(0, 0, 0, 0);
  const uint2 zero2 = make_uint2(0, 0);
  const bool in0 = first + g < end, in1 = first + g + 8 < end;
  const T* k0 = k.at(max(b, 0), h, in0 ? first + g : first);
  const T* k1 = k.at(max(b, 0), h, in1 ? first + g + 8 : first);
  const T* qr[NB];
  float s[NB][4];
#pragma unroll
  for (int n = 0; n < NB; n++) {
    qr[n] = c.q_row(h, min(r0 + 8 * n + g, rows - 1));
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
  }
  const T* vr[4];
  bool in[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = first + 2 * t + (i & 1) + 8 * (i >> 1);
    in[i] = n < end;
    vr[i] = v.at(max(b, 0), h, in[i] ? n : first);
  }
  auto load_values = [&](int ch, u32 (&w)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 x = in[i] && ch + 8 * g < D ? load8(vr[i] + (ch + 8 * g) * v.channel, v.channel, vv) : zero4;
      w[i][0] = x.x; w[i][1] = x.y; w[i][2] = x.z; w[i][3] = x.w;
    }
  };
  constexpr int EARLY = NB == 1 && D <= 128 ? (D + 63) / 64 : 1;  // as many as there are registers for
  u32 w[EARLY][4][4];
#pragma unroll
  for (int i = 0; i < EARLY; i++) load_values(64 * i, w[i]);  // on their way while the scores are made
  // Several loads before the first product that waits for one: the branch in load8 keeps the compiler from it.
  constexpr int BATCH = NB == 1 ? 4 : 2;
#pragma unroll
  for (int first_j = 0; first_j < D / 32; first_j += BATCH) {
    uint4 x[BATCH], y[BATCH], q[BATCH][NB];
#pragma unroll
    for (int i = 0; i < BATCH && first_j + i < D / 32; i++) {
      const int ch = 32 * (first_j + i) + 8 * t;
      x[i] = in0 ? load8(k0 + ch * k.channel, k.channel, kv) : zero4;
      y[i] = in1 ? load8(k1 + ch * k.channel, k.channel, kv) : zero4;
#pragma unroll
      for (int n = 0; n < NB; n++) q[i][n] = load8(qr[n] + ch * c.q.channel, c.q.channel, qv);
    }
#pragma unroll
    for (int i = 0; i < BATCH && first_j + i < D / 32; i++)
#pragma unroll
      for (int n = 0; n < NB; n++) {
        mma_dense<T>(s[n], x[i].x, y[i].x, x[i].z, y[i].z, q[i][n].x, q[i][n].z);
        mma_dense<T>(s[n], x[i].y, y[i].y, x[i].w, y[i].w, q[i][n].y, q[i][n].w);
      }
  }
  if (D % 32) {
    const int ch = D - 16 + 4 * t;
    const uint2 x = in0 ? load4(k0 + ch * k.channel, k.channel, kv) : zero2;
    const uint2 y = in1 ? load4(k1 + ch * k.channel, k.channel, kv) : zero2;
#pragma unroll
    for (int n = 0; n < NB; n++) {
      const uint2 q = load4(qr[n] + ch * c.q.channel, c.q.channel, qv);
      mma_dense<T>(s[n], x.x, y.x, x.y, y.y, q.x, q.y);
    }
  }
  u32 p[NB][2];
  float shrink[NB];  // of row g: what o is multiplied by
#pragma unroll
  for (int n = 0; n < NB; n++) {
    float al[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = r0 + 8 * n + 2 * t + e;
      bool see0 = in0, see1 = in1;
      if (b >= 0) {
        const int own = end - c.num_queries + r % c.num_queries;
        const bool mine = r / c.rows_per_batch() == b;
        const int oldest = c.window ? own - c.window : -1;
        see0 = mine && first + g <= own && first + g > oldest;
        see1 = mine && first + g + 8 <= own && first + g + 8 > oldest;
      }
      const float x = see0 ? s[n][e] * c.scale : -INFINITY, y = see1 ? s[n][e + 2] * c.scale : -INFINITY;
      float top = fmaxf(x, y);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      top = fmaxf(top, m[n][e]);
      al[e] = ex2(m[n][e] - top);
      m[n][e] = top;
      s[n][e] = ex2(x - top);
      s[n][e + 2] = ex2(y - top);
      l[n][e] = l[n][e] * al[e] + s[n][e] + s[n][e + 2];
    }
    p[n][0] = transpose8x8(pack2<T>(s[n][0], s[n][1]));
    p[n][1] = transpose8x8(pack2<T>(s[n][2], s[n][3]));
    const float even = __shfl_sync(~0u, al[0], g >> 1), odd = __shfl_sync(~0u, al[1], g >> 1);
    shrink[n] = g & 1 ? odd : even;
  }
#pragma unroll
  for (int ch = 0; ch < D; ch += 64) {
    u32 (&x)[4][4] = w[ch / 64 % EARLY];
    if (ch >= 64 * EARLY) load_values(ch, x);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 b0 = __byte_perm(x[0][j / 2], x[1][j / 2], j & 1 ? 0x7632 : 0x5410);
      const u32 b1 = __byte_perm(x[2][j / 2], x[3][j / 2], j & 1 ? 0x7632 : 0x5410);
      float d[4] = {0, 0, 0, 0};
      mma_dense<T>(d, p[0][0], NB > 1 ? p[NB - 1][0] : 0u, p[0][1], NB > 1 ? p[NB - 1][1] : 0u, b0, b1);
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int channel = ch + 16 * t + 8 * e + j;
          if (channel >= D) continue;
          float* at = o + (8 * n + g) * O_PITCH + channel;
          *at = fresh ? d[2 * n + e] : *at * shrink[n] + d[2 * n + e];
        }
    }
  }
}

// The pieces of CTA `cta` of `ctas`. o: this warp's own rows; ml: [warp][8 NB] pairs (max, sum) for the merge, max
// -inf where the warp had nothing.
template <class T, int NB, int NW>
__device__ __forceinline__ void dense_pieces(const Call<T>& c, int h, int r0, int cta, int ctas, float* o, float2* ml) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int b0 = r0 / c.rows_per_batch(), b1 = (min(r0 + 8 * NB, c.rows()) - 1) / c.rows_per_batch();
  const int in_sinks = pieces(c.num_sinks, 16), in_tail = pieces(c.num_tail, 16);
  const int total = in_sinks + (b1 - b0 + 1) * in_tail;
  float m[NB][2], l[NB][2];
#pragma unroll
  for (int n = 0; n < NB; n++) {
    m[n][0] = m[n][1] = NONE;
    l[n][0] = l[n][1] = 0;
  }
  bool fresh = true;
  const int first_length = c.tail_length(b0);
#pragma unroll 1
  for (int i = cta + ctas * warp; i < total; i += ctas * NW) {
    const bool sinks = i < in_sinks;
    const int b = sinks ? -1 : b0 + (i - in_sinks) / in_tail;
    const int first = 16 * (sinks ? i : (i - in_sinks) % in_tail);
    const int end = sinks ? c.num_sinks : b == b0 ? first_length : c.tail_length(b);
    if (first >= end) continue;
    if (!sinks && c.window && first + 15 <= end - c.num_queries - c.window) continue;
    dense_piece<T, NB>(c, choose(sinks, c.sinks_k, c.tail_k), choose(sinks, c.sinks_v, c.tail_v), h, r0, b, first, end, fresh, m, l, o);
    fresh = false;
    __syncwarp();
  }
#pragma unroll
  for (int n = 0; n < NB; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = l[n][e];
      x += __shfl_xor_sync(~0u, x, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      x += __shfl_xor_sync(~0u, x, 16);
      if (g == 0) ml[warp * 8 * NB + 8 * n + 2 * t + e] = make_float2(fresh ? -INFINITY : m[n][e], x);
    }
}

// Merge the warps' dense parts, rotate, write the partial. A warp owns a row.
template <int NB, int NW>
__device__ __forceinline__ void dense_merge(const u8* smem, int pitch, const float2* ml, int r0, int rows, float* scratch, float* po, float* pl) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int r = warp; r < 8 * NB && r0 + r < rows; r += NW) {
    float top = NONE, sum = 0;
#pragma unroll 4
    for (int w = 0; w < NW; w++) top = fmaxf(top, ml[w * 8 * NB + r].x);
    Row x;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x.v[i] = 0;
#pragma unroll 4
    for (int w = 0; w < NW; w++) {
      const float2 e = ml[w * 8 * NB + r];
      const float f = ex2(e.x - top);
      const float* o = (const float*)(smem + w * pitch) + r * O_PITCH;
      if (e.x == -INFINITY) continue;  // its o was never written
      sum += f * e.y;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (lane + 32 * i < D) x.v[i] += f * o[lane + 32 * i];
    }
    rotate<false>(x, lane, scratch);
    const float inverse = sum > 0 ? 1.f / sum : 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) po[(i64)(r0 + r) * D + lane + 32 * i] = x.v[i] * inverse;
    if (lane == 0) pl[r0 + r] = top + lg2(sum);
  }
}

}  // namespace longleaf
