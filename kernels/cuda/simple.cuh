// First launch for float32 queries: the same partials as split.cuh, in fp32 throughout.
//
// Grid: (row groups of 8, CTAs per head, KV heads), 8 warps, a warp a row. 32 tokens at a time are decoded into
// shared memory, keys first and then values in the same place: a lane scores one token, then owns channels
// lane + 32 i of the output. The first `dense_ctas` CTAs take the sinks and tails before their share of tiles.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int SIMPLE_WARPS = 8;
constexpr int TOKENS = 32;
constexpr int PITCH = D + 1;

struct SimpleShared {
  float tokens[TOKENS * PITCH];
  float plain[SIMPLE_WARPS][D], rotated[SIMPLE_WARPS][D];
};

struct Running {
  float m = NONE, l = 0;
  Row o;
  __device__ Running() {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) o.v[i] = 0;
  }
};

// K or V of slice s in device order -> tokens[32][PITCH], in the rotated basis. All threads.
template <bool KEYS>
__device__ __forceinline__ void decode_slice(const u8* tile, int s, float* tokens) {
  const u8* slice = tile + s * SLICE;
  const u32* words = (const u32*)(slice + (KEYS ? K_CODES : V_CODES));
  const __half* scales = (const __half*)(slice + (KEYS ? K_SCALES : V_SCALES));
  for (int i = threadIdx.x; i < 2 * STEPS * 32; i += blockDim.x) {
    const int lane = i & 31, step = i / 32 % STEPS, j = i / 32 / STEPS, g = lane >> 2, t = lane & 3;
    const u32 w = words[j * 2 * D + code_word(step, lane)];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int y = n >> 1, along = 2 * t + 8 * (y & 1) + (y >> 1), across = g + 8 * (n & 1);
      const int token = KEYS ? across : along, ch = 16 * step + (KEYS ? along : across), k = ch / GROUP;
      const int at = KEYS ? (((token & 7) * GROUPS + k) * 2 + j) * 2 + (token >> 3)
                          : ((((j * 4 + (token & 7) / 2) * GROUPS + k) * 2 + (token >> 3)) * 2 + (token & 1));
      tokens[(16 * j + token) * PITCH + ch] = ((w >> (4 * n) & 15) - 7.5f) * __half2float(scales[at]);
    }
  }
}

template <class T>
__device__ __forceinline__ void load_dense(const Strided<T>& x, int b, int h, int first, int end, float* tokens) {
  for (int i = threadIdx.x; i < TOKENS * D; i += blockDim.x) {
    const int n = i / D, ch = i % D;
    tokens[n * PITCH + ch] = first + n < end ? (float)x.at(b, h, first + n)[ch * x.channel] : 0.f;
  }
}

__device__ __forceinline__ float dot(const float* q, const float* token) {
  float s = 0;
#pragma unroll 8
  for (int ch = 0; ch < D; ch++) s += q[ch] * token[ch];
  return s;
}

// This lane's token has base-2 logit x (-inf: not seen). Returns its weight; the state is rescaled.
__device__ __forceinline__ float weigh(Running& run, float x) {
  const float top = fmaxf(run.m, warp_max(x)), shrink = exp2f(run.m - top), p = exp2f(x - top);
  run.m = top;
  run.l = run.l * shrink + p;  // per lane
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) run.o.v[i] *= shrink;
  return p;
}

__device__ __forceinline__ void add_values(Running& run, float p, const float* tokens, int lane) {
#pragma unroll 4
  for (int n = 0; n < TOKENS; n++) {
    const float w = __shfl_sync(~0u, p, n);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) run.o.v[i] += w * tokens[n * PITCH + lane + 32 * i];
  }
}

__device__ __forceinline__ void write_partial(const Running& run, bool there, int lane, float* po, float* pl) {
  const float sum = warp_sum(run.l);
  if (!there) return;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < D) po[lane + 32 * i] = sum > 0 ? run.o.v[i] / sum : 0.f;
  if (lane == 0) *pl = run.m + log2f(sum);
}

template <class T>
__device__ __forceinline__ void simple_split(const Call<T>& c, int dense_ctas, u8* memory, float* __restrict__ po, float* __restrict__ pl) {
  SimpleShared& s = *(SimpleShared*)memory;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int h = blockIdx.z, cta = blockIdx.y, ctas = gridDim.y, r0 = blockIdx.x * SIMPLE_WARPS, rows = c.rows();
  const int row = r0 + warp, partials = ctas + dense_ctas;
  const bool there = row < rows;
  po += ((i64)h * partials * rows + min(row, rows - 1)) * D;
  pl += (i64)h * partials * rows + min(row, rows - 1);
  {
    Row x;
    const T* q = c.q_row(h, there ? row : 0);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      x.v[i] = ch < D ? (float)q[ch * c.q.channel] : 0.f;
      if (ch < D) s.plain[warp][ch] = x.v[i];
    }
    rotate<false>(x, lane, s.rotated[warp]);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) s.rotated[warp][lane + 32 * i] = x.v[i];
  }

  if (cta < dense_ctas) {
    Running run;
    const int b0 = r0 / c.rows_per_batch(), b1 = (min(r0 + SIMPLE_WARPS, rows) - 1) / c.rows_per_batch();
    const int in_sinks = pieces(c.num_sinks, TOKENS), in_tail = pieces(c.num_tail, TOKENS);
    for (int i = cta; i < in_sinks + (b1 - b0 + 1) * in_tail; i += dense_ctas) {
      const bool sinks = i < in_sinks;
      const int b = sinks ? 0 : b0 + (i - in_sinks) / in_tail;
      const int first = TOKENS * (sinks ? i : (i - in_sinks) % in_tail), end = sinks ? c.num_sinks : c.tail_length(b);
      if (first >= end) continue;
      __syncthreads();
      load_dense(sinks ? c.sinks_k : c.tail_k, b, h, first, end, s.tokens);
      __syncthreads();
      const int n = first + lane, own = end - c.num_queries + row % c.num_queries;
      bool seen = n < end;
      if (!sinks) seen = row / c.rows_per_batch() == b && n <= own && !(c.window && n <= own - c.window);
      const float p = weigh(run, seen ? dot(s.plain[warp], s.tokens + lane * PITCH) * c.scale : -INFINITY);
      __syncthreads();
      load_dense(sinks ? c.sinks_v : c.tail_v, b, h, first, end, s.tokens);
      __syncthreads();
      add_values(run, p, s.tokens, lane);
    }
    __syncthreads();
    rotate<false>(run.o, lane, s.tokens + warp * D);
    write_partial(run, there, lane, po + (i64)(ctas + cta) * rows * D, pl + (i64)(ctas + cta) * rows);
  }

  Running run;
  float mean = 0;
  const int slices = 4 * c.num_tiles, c0 = (int)((i64)slices * cta / ctas), c1 = (int)((i64)slices * (cta + 1) / ctas);
  for (int i = c0; i < c1; i++) {
    const u8* tile = (const u8*)(c.tiles + (i >> 2) * c.tile_pitch + h * c.head_pitch);
    __syncthreads();
    if (i == c0 || !(i & 3)) {
      float x = 0;
      for (int ch = lane; ch < D; ch += 32) x += s.plain[warp][ch] * __half2float(((const __half*)(tile + MEAN))[ch]);
      mean = warp_sum(x);
    }
    decode_slice<true>(tile, i & 3, s.tokens);
    __syncthreads();
    const float p = weigh(run, (dot(s.rotated[warp], s.tokens + lane * PITCH) + mean) * c.scale);
    __syncthreads();
    decode_slice<false>(tile, i & 3, s.tokens);
    __syncthreads();
    add_values(run, p, s.tokens, lane);
  }
  write_partial(run, there, lane, po + (i64)cta * rows * D, pl + (i64)cta * rows);
}

}  // namespace longleaf
