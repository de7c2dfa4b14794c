// First launch for float32 queries: the same partials as split.cuh, in fp32 throughout.
//
// Grid: `Cut` in common.cuh, row groups of 8, 8 warps, a warp a row. 32 tokens at a time are decoded into shared
// memory, keys first and then values in the same place: a lane scores one token, then owns channels lane + 32 i
// of the output.
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

// K or V of slice s in device order -> tokens[32][PITCH], in the rotated basis unless AFFINE. All threads.
template <bool KEYS>
__device__ __forceinline__ void decode_slice(const u8* tile, int s, float* tokens) {
  constexpr int BITS = KEYS ? K_BITS : V_BITS;
  const u8* slice = tile + s * SLICE;
  const u32* words = (const u32*)(slice + (KEYS ? K_CODES : V_CODES));
  const __half* scales = (const __half*)(slice + (KEYS ? K_SCALES : V_SCALES));
  const __half* biases = (const __half*)(slice + (KEYS ? K_BIASES : V_BIASES));
  for (int x = threadIdx.x; x < 2 * WORDS<BITS> * 32; x += blockDim.x) {
    const int lane = x & 31, i = x / 32 % WORDS<BITS>, j = x / 32 / WORDS<BITS>;
    const u32 w = words[j * WORDS<BITS> * 32 + code_word<BITS>(i, lane)];
#pragma unroll
    for (int n = 0; n < 32 / BITS; n++) {
      int step, across, along;
      place_of<BITS>(i, lane, n, step, across, along);
      const int token = 16 * j + (KEYS ? across : along), ch = 16 * step + (KEYS ? along : across);
      const int at = scale_place<KEYS>(token, ch / GROUP);
      const float code = w >> (BITS * n) & ((1 << BITS) - 1), scale = __half2float(scales[at]);
      tokens[token * PITCH + ch] = AFFINE ? code * scale + __half2float(biases[at]) : (code - midrise(BITS)) * scale;
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

// The dense share `share` of `shares` of one row group, not rotated.
template <class T>
__device__ __forceinline__ void add_dense(Running& run, const Call<T>& c, SimpleShared& s, int h, int r0, int share, int shares) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = r0 + warp;
  const int b0 = r0 / c.rows_per_batch(), b1 = (min(r0 + SIMPLE_WARPS, c.rows()) - 1) / c.rows_per_batch();
  const int in_sinks = pieces(c.num_sinks, TOKENS), in_tail = pieces(c.num_tail, TOKENS);
  for (int i = share; i < in_sinks + (b1 - b0 + 1) * in_tail; i += shares) {
    const bool sinks = i < in_sinks;
    const int b = sinks ? 0 : b0 + (i - in_sinks) / in_tail;
    const int first = TOKENS * (sinks ? i : (i - in_sinks) % in_tail), end = sinks ? c.num_sinks : c.tail_length(b);
    if (first >= end) continue;
    __syncthreads();
    load_dense(choose(sinks, c.sinks_k, c.tail_k), b, h, first, end, s.tokens);
    __syncthreads();
    const int n = first + lane, own = end - c.num_queries + row % c.num_queries;
    bool seen = n < end;
    if (!sinks) seen = row / c.rows_per_batch() == b && n <= own && !(c.window && n <= own - c.window);
    const float p = weigh(run, seen ? dot(s.plain[warp], s.tokens + lane * PITCH) * c.scale : -INFINITY);
    __syncthreads();
    load_dense(choose(sinks, c.sinks_v, c.tail_v), b, h, first, end, s.tokens);
    __syncthreads();
    add_values(run, p, s.tokens, lane);
  }
  __syncthreads();
}

// Slices c0..c1 of the head's tiles, in the rotated basis.
template <class T>
__device__ __forceinline__ void add_tiles(Running& run, const Call<T>& c, SimpleShared& s, int h, int c0, int c1) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float mean = 0;
  for (int i = c0; i < c1; i++) {
    const u8* tile = (const u8*)(c.tiles + (i >> 2) * c.tile_pitch + h * c.head_pitch);
    __syncthreads();
    if (!AFFINE && (i == c0 || !(i & 3))) {
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
}

template <class T>
__device__ __forceinline__ void simple_split(const Call<T>& c, const Cut all, u8* memory, float* __restrict__ po, float* __restrict__ pl) {
  SimpleShared& s = *(SimpleShared*)memory;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rows = c.rows();
  const int groups = c.num_heads * all.row_groups, streams = groups * all.streams;
  const bool dense = blockIdx.x >= streams;
  const int step = dense ? all.workers : gridDim.x, end = dense ? groups * all.dense : streams;
  for (int i = dense ? blockIdx.x - streams : blockIdx.x; i < end; i += step) {
    // streams run over (row group, head, range), dense items over (share, row group, head)
    const int h = dense ? i % c.num_heads : i / all.streams % c.num_heads;
    const int r0 = (dense ? i / c.num_heads % all.row_groups : i / all.streams / c.num_heads) * SIMPLE_WARPS;
    const int part = dense ? i / groups : i % all.streams, row = min(r0 + warp, rows - 1);
    __syncthreads();
    Row x;
    const T* q = c.q_row(h, row);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
      const int ch = lane + 32 * k;
      x.v[k] = ch < D ? (float)q[ch * c.q.channel] : 0.f;
      if (ch < D) s.plain[warp][ch] = x.v[k];
    }
    rotate<false>(x, lane, s.rotated[warp]);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
      if (lane + 32 * k < D) s.rotated[warp][lane + 32 * k] = x.v[k];
    __syncwarp();
    Running run;
    if (dense) {
      add_dense(run, c, s, h, r0, part, all.dense);
      rotate<false>(run.o, lane, s.tokens + warp * D);
    } else {
      add_tiles(run, c, s, h, all.begin(part), all.begin(part + 1));
    }
    const i64 p = (i64)h * all.partials() + (dense ? all.streams + part : part);
    write_partial(run, r0 + warp < rows, lane, po + (p * rows + row) * D, pl + p * rows + row);
  }
}

}  // namespace longleaf
