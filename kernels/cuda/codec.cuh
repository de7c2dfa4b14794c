// The rotated formats' codec: encode to canonical tiles, decode from them. And the way of every format from canonical
// order to device order and back.
//
// encode: grid (blocks, heads, 2), a CTA of 8 warps per keys (z = 0) or values (z = 1) of a tile. A warp rotates a few
// tokens, a lane a channel, then codes four scale groups at once, eight lanes a group.
// decode: the same grid, a warp a token. reorder: grid (slices), through shared memory. Arithmetic: fp32.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int CODEC_WARPS = 8;
constexpr int TILE_WORDS = TILE / 4;
// The canonical order, in words.
constexpr int SCALE_WORDS = BLOCK * GROUPS / 2;
constexpr int K_SCALES_WORD = BLOCK * D * K_BITS / 32;
constexpr int K_OFFSETS_WORD = K_SCALES_WORD + SCALE_WORDS;  // the mean, or the keys' biases
constexpr int VALUES_WORD = K_OFFSETS_WORD + (AFFINE ? SCALE_WORDS : D / 2);
constexpr int V_SCALES_WORD = VALUES_WORD + BLOCK * D * V_BITS / 32;
constexpr float HALF_MAX = 65504.f;

// The code of x, as a float. inverse: of the scale; a division per value would take most of the time. Adding 2^23
// while rounding down is `floor` of what is not negative, at the rate of an addition.
template <int BITS>
__device__ __forceinline__ float code_of(float x, float inverse) {
  constexpr float MIDDLE = 1 << (BITS - 1), FLOOR = 8388608.f;
  return __fadd_rd(fminf(fmaxf(fmaf(x, inverse, MIDDLE), 0.f), 2 * MIDDLE - 1), FLOOR) - FLOOR;
}
__device__ __forceinline__ float stored(float scale) { return __half2float(__float2half_rn(fminf(scale, HALF_MAX))); }
__device__ __forceinline__ float inverse_of(float scale) { return 1.f / fmaxf(scale, 1e-30f); }

constexpr int LANES = 8;  // of a group, each with 8 neighbouring channels
constexpr int AT_ONCE = D <= 128 ? 4 : D <= 256 ? 2 : 1;  // tokens that a warp has in shared memory

__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int i = LANES / 2; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// The scale of a group with the smallest squared error among 0.24, 0.26 .. 0.46 of its RMS, as kernels/codec.py has it.
__device__ __forceinline__ float search(const float (&x)[8], bool there) {
  constexpr int STEPS_TRIED = 12;
  const int l = threadIdx.x % LANES;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) squares += x[i] * x[i];
  const float rms = sqrtf(group_sum(squares) / GROUP);
  // Lane l has steps l and l + 8, so that a division is made once.
  float scales[2], inverses[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scales[i] = stored(rms * (float)(0.24 + 0.02 * (l + LANES * i)));
    inverses[i] = inverse_of(scales[i]);
  }
  float best_error = INFINITY, best = rms;
#pragma unroll
  for (int step = 0; step < STEPS_TRIED; step++) {
    const float scale = __shfl_sync(~0u, scales[step / LANES], step % LANES, LANES);
    const float inverse = __shfl_sync(~0u, inverses[step / LANES], step % LANES, LANES);
    float error = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float e = (code_of<4>(x[i], inverse) - midrise(4)) * scale - x[i];
      error += e * e;
    }
    error = group_sum(there ? error : 0.f);
    if (error < best_error) {
      best_error = error;
      best = scale;
    }
  }
  return best;
}

struct EncodeShared {
  float mean[D], rows[CODEC_WARPS][AT_ONCE][D];
};

template <class T, int BITS, bool KEYS>
__device__ __forceinline__ void encode_part(const Strided<T>& x, u32* tile, EncodeShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, h = blockIdx.y;
  u32* to = tile + (KEYS ? 0 : VALUES_WORD);
  __half* scales = (__half*)(tile + (KEYS ? K_SCALES_WORD : V_SCALES_WORD));
  if (KEYS) {
    Row sum;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum.v[i] = 0;
    for (int n = warp; n < BLOCK; n += CODEC_WARPS) {
      const T* from = x.at(0, h, blockIdx.x * BLOCK + n);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (lane + 32 * i < D) sum.v[i] += (float)from[(lane + 32 * i) * x.channel];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) s.rows[warp][0][lane + 32 * i] = sum.v[i];
    __syncthreads();
    for (int ch = threadIdx.x; ch < D; ch += CODEC_WARPS * 32) {
      float total = 0;
      for (int w = 0; w < CODEC_WARPS; w++) total += s.rows[w][0][ch];
      const __half m = __float2half_rn(fminf(fmaxf(total / BLOCK, -HALF_MAX), HALF_MAX));
      ((__half*)(tile + K_OFFSETS_WORD))[ch] = m;
      s.mean[ch] = __half2float(m);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int first = warp * AT_ONCE; first < BLOCK; first += CODEC_WARPS * AT_ONCE) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const T* from = x.at(0, h, blockIdx.x * BLOCK + first + n);
      Row r;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        const int ch = lane + 32 * i;
        r.v[i] = ch < D ? (float)from[ch * x.channel] - (KEYS ? s.mean[ch] : 0.f) : 0.f;
      }
      rotate<false>(r, lane, s.rows[warp][n]);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (lane + 32 * i < D) s.rows[warp][n][lane + 32 * i] = r.v[i];
    }
    __syncwarp();
    constexpr int ITEMS = AT_ONCE * GROUPS;
#pragma unroll 1
    for (int some = 0; some < ITEMS; some += 32 / LANES) {
      // Where the last four are not all there, some do the last one again.
      const int item = min(some + lane / LANES, ITEMS - 1), n = item / GROUPS, group = item % GROUPS, channel = group * GROUP + lane % LANES * 8;
      const bool there = lane % LANES * 8 < GROUP;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 y = there ? *(const float4*)(s.rows[warp][n] + channel + i) : make_float4(0, 0, 0, 0);
        v[i] = y.x; v[i + 1] = y.y; v[i + 2] = y.z; v[i + 3] = y.w;
      }
      float scale;
      if (BITS == 4) scale = search(v, there);
      else {
        float top = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
#pragma unroll
        for (int i = LANES / 2; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        scale = stored(top / midrise(8));
      }
      const float inverse = inverse_of(scale);
      u32 w[BITS / 4];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 code = (u32)code_of<BITS>(v[i], inverse) << (BITS * i % 32);
        w[BITS * i / 32] = BITS * i % 32 ? w[BITS * i / 32] | code : code;
      }
      const int token = first + n;
#pragma unroll
      for (int i = 0; i < BITS / 4; i++)
        if (there) to[(token * D + channel) * BITS / 32 + i] = w[i];
      if (lane % LANES == 0) scales[token * GROUPS + group] = __float2half_rn(scale);
    }
    __syncwarp();
  }
}

template <class T>
__device__ __forceinline__ void encode(const Strided<T>& k, const Strided<T>& v, u32* tiles) {
  u32* tile = tiles + ((i64)blockIdx.x * gridDim.y + blockIdx.y) * TILE_WORDS;
  __shared__ __align__(16) EncodeShared memory;
  if (blockIdx.z == 0) encode_part<T, K_BITS, true>(k, tile, memory);
  else encode_part<T, V_BITS, false>(v, tile, memory);
}

template <class T, int BITS, bool KEYS>
__device__ __forceinline__ void decode_part(const u32* tile, T* out, float (&scratch)[CODEC_WARPS][D]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32* from = tile + (KEYS ? 0 : VALUES_WORD);
  const __half* scales = (const __half*)(tile + (KEYS ? K_SCALES_WORD : V_SCALES_WORD));
  const __half* mean = (const __half*)(tile + K_OFFSETS_WORD);
  for (int n = warp; n < BLOCK; n += CODEC_WARPS) {
    Row r;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i, at = (n * D + ch) * BITS;
      r.v[i] = 0;
      if (ch < D) r.v[i] = ((float)(from[at / 32] >> at % 32 & ((1 << BITS) - 1)) - midrise(BITS)) * __half2float(scales[n * GROUPS + ch / GROUP]);
    }
    rotate<true>(r, lane, scratch[warp]);
    T* to = out + (((i64)blockIdx.y * gridDim.x + blockIdx.x) * BLOCK + n) * D;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      if (ch < D) to[ch] = from_float<T>(r.v[i] + (KEYS ? __half2float(mean[ch]) : 0.f));
    }
  }
}

template <class T>
__device__ __forceinline__ void decode(const u32* tiles, T* k, T* v) {
  const u32* tile = tiles + ((i64)blockIdx.x * gridDim.y + blockIdx.y) * TILE_WORDS;
  __shared__ float scratch[CODEC_WARPS][D];
  if (blockIdx.z == 0) decode_part<T, K_BITS, true>(tile, k, scratch);
  else decode_part<T, V_BITS, false>(tile, v, scratch);
}

// A slice's codes of keys or values, word by word of the result.
template <bool KEYS, bool TO_DEVICE>
__device__ __forceinline__ void reorder_codes(const u32* from, u32* to) {
  constexpr int BITS = KEYS ? K_BITS : V_BITS, PER_WORD = 32 / BITS, N = WORDS<BITS>;
  for (int x = threadIdx.x; x < D * BITS; x += blockDim.x) {
    u32 w = 0;
    if (TO_DEVICE) {
      const int lane = x % 32, i = x / 32 % N, j = x / 32 / N;
#pragma unroll
      for (int n = 0; n < PER_WORD; n++) {
        int step, across, along;
        place_of<BITS>(i, lane, n, step, across, along);
        const int token = 16 * j + (KEYS ? across : along), at = (token * D + 16 * step + (KEYS ? along : across)) * BITS;
        w |= (from[at / 32] >> at % 32 & ((1 << BITS) - 1)) << (BITS * n);
      }
      to[j * N * 32 + code_word<BITS>(i, lane)] = w;
    } else {
#pragma unroll
      for (int n = 0; n < PER_WORD; n++) {
        const int code = x * PER_WORD + n, token = code / D, ch = code % D;
        const int across = (KEYS ? token : ch) % 16, along = (KEYS ? ch : token) % 16, upper_half = along / 8;
        // `place_of`, solved for the word and the place in it
        const int lane = across % 8 * 4 + along % 8 / 2, i = ch / 16 * (BITS / 4) + (BITS == 8 ? upper_half : 0);
        const int place = 2 * (BITS == 8 ? along & 1 : upper_half + 2 * (along & 1)) + across / 8;
        w |= (from[token / 16 * N * 32 + code_word<BITS>(i, lane)] >> (BITS * place) & ((1 << BITS) - 1)) << (BITS * n);
      }
      to[x] = w;
    }
  }
}

template <bool KEYS, bool TO_DEVICE>
__device__ __forceinline__ void reorder_scales(const u8* from, u8* to) {
  for (int i = threadIdx.x; i < 32 * GROUPS; i += blockDim.x) {
    const int device = scale_place<KEYS>(i / GROUPS, i % GROUPS);
    ((__half*)to)[TO_DEVICE ? device : i] = ((const __half*)from)[TO_DEVICE ? i : device];
  }
}

// Between a slice's part of the tile and its place in memory.
template <bool TO_TILE, class Word>
__device__ __forceinline__ void move_part(Word* tile, u8* memory, int slice, int word, int place, int bytes) {
  auto* there = (uint4*)(tile + word) + slice * bytes / 16;
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    uint4& here = ((uint4*)(memory + place))[i];
    if (TO_TILE) there[i] = here;
    else here = there[i];
  }
}
template <bool TO_TILE, class Word>
__device__ __forceinline__ void move_parts(Word* tile, u8* memory, int slice) {
  move_part<TO_TILE>(tile, memory, slice, 0, K_CODES, V_CODES);
  move_part<TO_TILE>(tile, memory, slice, K_SCALES_WORD, K_SCALES, 64 * GROUPS);
  move_part<TO_TILE>(tile, memory, slice, VALUES_WORD, V_CODES, K_SCALES - V_CODES);
  move_part<TO_TILE>(tile, memory, slice, V_SCALES_WORD, V_SCALES, 64 * GROUPS);
  if (AFFINE) {
    move_part<TO_TILE>(tile, memory, slice, K_OFFSETS_WORD, K_BIASES, 64 * GROUPS);
    move_part<TO_TILE>(tile, memory, slice, V_SCALES_WORD + SCALE_WORDS, V_BIASES, 64 * GROUPS);
  }
}

// memory: two slices, the source and the result, so that both ends move whole lines. Either way a slice's parts stand
// in it where the device order has them; in canonical order each part is sorted by token.
template <bool TO_DEVICE>
__device__ __forceinline__ void reorder(const u32* tiles, u32* out, u8* memory) {
  const int slice = blockIdx.x % 4;
  const i64 at = (i64)(blockIdx.x / 4) * TILE_WORDS;
  const u32* tile = tiles + at;
  u8 *from = memory, *to = memory + SLICE;
  if (TO_DEVICE) move_parts<false>(tile, from, slice);
  else move_part<false>(tile, from, slice, 0, 0, SLICE);
  __syncthreads();
  reorder_codes<true, TO_DEVICE>((const u32*)(from + K_CODES), (u32*)(to + K_CODES));
  reorder_codes<false, TO_DEVICE>((const u32*)(from + V_CODES), (u32*)(to + V_CODES));
  reorder_scales<true, TO_DEVICE>(from + K_SCALES, to + K_SCALES);
  reorder_scales<false, TO_DEVICE>(from + V_SCALES, to + V_SCALES);
  if (AFFINE) {
    reorder_scales<true, TO_DEVICE>(from + K_BIASES, to + K_BIASES);
    reorder_scales<false, TO_DEVICE>(from + V_BIASES, to + V_BIASES);
  }
  __syncthreads();
  if (TO_DEVICE) move_part<true>(out + at, to, slice, 0, 0, SLICE);
  else move_parts<true>(out + at, to, slice);
  if (slice == 0)
    for (int i = threadIdx.x; i < MEAN_BYTES / 4; i += blockDim.x)
      out[at + (TO_DEVICE ? MEAN / 4 : K_OFFSETS_WORD) + i] = tile[(TO_DEVICE ? K_OFFSETS_WORD : MEAN / 4) + i];
}

}  // namespace longleaf
