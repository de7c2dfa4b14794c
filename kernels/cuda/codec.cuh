// The int4c codec: encode to canonical tiles, decode from them, and canonical order to device order and back.
//
// encode: grid (blocks, heads, 2), a CTA of 8 warps per keys (z = 0) or values (z = 1) of a tile, a warp a token.
// decode: the same grid. reorder: grid (tiles), a CTA a tile, through shared memory. Arithmetic: fp32.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int CODEC_WARPS = 8;
constexpr int TILE_WORDS = TILE / 4;
constexpr int CODE_WORDS = BLOCK * D / 8;
constexpr int SCALE_WORDS = BLOCK * GROUPS / 2;
constexpr int VALUES_WORD = CODE_WORDS + SCALE_WORDS + D / 2;  // first word of the value part, canonical order
constexpr float HALF_MAX = 65504.f;
constexpr bool REORDER_STAGED = 2 * TILE <= 98304;  // the source in shared memory too, where every device has room

// The code of x, as a float. inverse: of the scale; a division per value would take most of the time.
__device__ __forceinline__ float code_of(float x, float inverse) { return fminf(fmaxf(floorf(fmaf(x, inverse, 8.f)), 0.f), 15.f); }
__device__ __forceinline__ float inverse_of(float scale) { return 1.f / fmaxf(scale, 1e-30f); }

template <class T>
__device__ __forceinline__ void encode(const Strided<T>& k, const Strided<T>& v, u32* tiles) {
  __shared__ float mean[D], sums[CODEC_WARPS][D], rows[CODEC_WARPS][D];
  __shared__ __align__(4) u8 codes[CODEC_WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, h = blockIdx.y;
  const bool keys = blockIdx.z == 0;
  const Strided<T> x = choose(keys, k, v);
  u32* tile = tiles + ((i64)blockIdx.x * gridDim.y + h) * TILE_WORDS;
  u32* to = tile + (keys ? 0 : VALUES_WORD);
  __half* scales = (__half*)(to + CODE_WORDS);
  if (keys) {
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
      if (lane + 32 * i < D) sums[warp][lane + 32 * i] = sum.v[i];
    __syncthreads();
    for (int ch = threadIdx.x; ch < D; ch += CODEC_WARPS * 32) {
      float s = 0;
      for (int w = 0; w < CODEC_WARPS; w++) s += sums[w][ch];
      const __half m = __float2half_rn(fminf(fmaxf(s / BLOCK, -HALF_MAX), HALF_MAX));
      ((__half*)(tile + CODE_WORDS + SCALE_WORDS))[ch] = m;
      mean[ch] = __half2float(m);
    }
    __syncthreads();
  }
  for (int n = warp; n < BLOCK; n += CODEC_WARPS) {
    const T* from = x.at(0, h, blockIdx.x * BLOCK + n);
    Row r;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      r.v[i] = ch < D ? (float)from[ch * x.channel] - (keys ? mean[ch] : 0.f) : 0.f;
    }
    rotate<false>(r, lane, rows[warp]);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) rows[warp][lane + 32 * i] = r.v[i];
    __syncwarp();
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
      const float* from_group = rows[warp] + group * GROUP;
      const bool second = lane + 32 < GROUP, first = lane < GROUP;
      const float a = first ? from_group[lane] : 0.f, b = second ? from_group[lane + 32] : 0.f;
      const float rms = sqrtf(warp_sum(a * a + b * b) / GROUP);
      float best_error = INFINITY, best = rms;
#pragma unroll 4
      for (int step = 0; step < 12; step++) {
        const float scale = __half2float(__float2half_rn(fminf(rms * (float)(0.24 + 0.02 * step), HALF_MAX)));
        const float inverse = inverse_of(scale);
        const float ea = first ? (code_of(a, inverse) - 7.5f) * scale - a : 0.f;
        const float eb = second ? (code_of(b, inverse) - 7.5f) * scale - b : 0.f;
        const float error = warp_sum(ea * ea + eb * eb);
        if (error < best_error) {
          best_error = error;
          best = scale;
        }
      }
      const float inverse = inverse_of(best);
      if (first) codes[warp][group * GROUP + lane] = (u8)code_of(a, inverse);
      if (second) codes[warp][group * GROUP + lane + 32] = (u8)code_of(b, inverse);
      if (lane == 0) scales[n * GROUPS + group] = __float2half_rn(best);
    }
    __syncwarp();
    for (int i = lane; i < D / 8; i += 32) {
      u32 w = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) w |= (u32)codes[warp][8 * i + j] << (4 * j);
      to[n * (D / 8) + i] = w;
    }
    __syncwarp();
  }
}

template <class T>
__device__ __forceinline__ void decode(const u32* tiles, T* k, T* v) {
  __shared__ float scratch[CODEC_WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, h = blockIdx.y;
  const bool keys = blockIdx.z == 0;
  const u32* tile = tiles + ((i64)blockIdx.x * gridDim.y + h) * TILE_WORDS;
  const u32* from = tile + (keys ? 0 : VALUES_WORD);
  const __half* scales = (const __half*)(from + CODE_WORDS);
  const __half* mean = (const __half*)(tile + CODE_WORDS + SCALE_WORDS);
  for (int n = warp; n < BLOCK; n += CODEC_WARPS) {
    Row r;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      r.v[i] = 0;
      if (ch < D) r.v[i] = ((from[n * (D / 8) + ch / 8] >> (ch % 8 * 4) & 15) - 7.5f) * __half2float(scales[n * GROUPS + ch / GROUP]);
    }
    rotate<true>(r, lane, scratch[warp]);
    T* to = (keys ? k : v) + (((i64)h * gridDim.x + blockIdx.x) * BLOCK + n) * D;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      if (ch < D) to[ch] = from_float<T>(r.v[i] + (keys ? __half2float(mean[ch]) : 0.f));
    }
  }
}

// Where the device order keeps (token, channel): the word of the tile and the nibble in it.
template <bool KEYS>
__device__ __forceinline__ int device_code(int token, int ch, int& nibble) {
  const int j = token / 16 % 2, token16 = token % 16, ch16 = ch % 16;
  const int across = KEYS ? token16 : ch16, along = KEYS ? ch16 : token16;
  const int lane = across % 8 * 4 + along % 8 / 2;
  nibble = 2 * (along / 8 + 2 * (along & 1)) + across / 8;
  return (token / 32 * SLICE + (KEYS ? K_CODES : V_CODES)) / 4 + j * 2 * D + code_word(ch / 16, lane);
}
// Which token and channel a nibble of a word of device order is of.
template <bool KEYS>
__device__ __forceinline__ void of_device_code(int slice, int word, int nibble, int& token, int& ch) {
  const int j = word / (2 * D), x = word % (2 * D), quads = STEPS / 4;
  int step, lane;
  if (x < 128 * quads) step = x / 128 * 4 + x % 4, lane = x / 4 % 32;
  else if (STEPS % 4 >= 2 && x < 128 * quads + 64) step = 4 * quads + x % 2, lane = (x - 128 * quads) / 2;
  else step = STEPS - 1, lane = x % 32;
  const int y = nibble >> 1, along = 2 * (lane & 3) + 8 * (y & 1) + (y >> 1), across = (lane >> 2) + 8 * (nibble & 1);
  token = 32 * slice + 16 * j + (KEYS ? across : along);
  ch = 16 * step + (KEYS ? along : across);
}
// Half index of a scale in the tile, device order.
template <bool KEYS>
__device__ __forceinline__ int device_scale(int token, int group) {
  const int j = token / 16 % 2, x = token % 16;
  const int at = KEYS ? ((x % 8 * GROUPS + group) * 2 + j) * 2 + x / 8 : (((j * 4 + x % 8 / 2) * GROUPS + group) * 2 + x / 8) * 2 + x % 2;
  return (token / 32 * SLICE + (KEYS ? K_SCALES : V_SCALES)) / 2 + at;
}

template <bool KEYS, bool TO_DEVICE>
__device__ __forceinline__ void reorder_part(const u32* from, u32* to) {
  const int part = KEYS ? 0 : VALUES_WORD;
  for (int i = threadIdx.x; i < CODE_WORDS; i += blockDim.x) {
    u32 w = 0;
    if (TO_DEVICE) {
      const int slice = i / (4 * D), word = i % (4 * D);
#pragma unroll
      for (int n = 0; n < 8; n++) {
        int token, ch;
        of_device_code<KEYS>(slice, word, n, token, ch);
        w |= (from[part + token * (D / 8) + ch / 8] >> (ch % 8 * 4) & 15) << (4 * n);
      }
      to[(slice * SLICE + (KEYS ? K_CODES : V_CODES)) / 4 + word] = w;
    } else {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        int nibble;
        const int word = device_code<KEYS>(i / (D / 8), i % (D / 8) * 8 + n, nibble);
        w |= (from[word] >> (4 * nibble) & 15) << (4 * n);
      }
      to[part + i] = w;
    }
  }
  const unsigned short* half_from = (const unsigned short*)from;
  unsigned short* half_to = (unsigned short*)to;
  for (int i = threadIdx.x; i < BLOCK * GROUPS; i += blockDim.x) {
    const int canonical = 2 * (part + CODE_WORDS) + i, device = device_scale<KEYS>(i / GROUPS, i % GROUPS);
    half_to[TO_DEVICE ? device : canonical] = half_from[TO_DEVICE ? canonical : device];
  }
}

// memory: the result, then the source where REORDER_STAGED, so that both ends move whole lines.
template <bool TO_DEVICE>
__device__ __forceinline__ void reorder(const u32* tiles, u32* out, u32* memory) {
  const i64 tile = (i64)blockIdx.x * TILE_WORDS;
  u32* result = memory;
  const u32* from = tiles + tile;
  if (REORDER_STAGED) {
    from = memory + TILE_WORDS;
    for (int i = threadIdx.x; i < TILE_WORDS / 4; i += blockDim.x)
      ((uint4*)(memory + TILE_WORDS))[i] = ((const uint4*)(tiles + tile))[i];
    __syncthreads();
  }
  reorder_part<true, TO_DEVICE>(from, result);
  reorder_part<false, TO_DEVICE>(from, result);
  const int canonical = CODE_WORDS + SCALE_WORDS, device = MEAN / 4;
  for (int i = threadIdx.x; i < D / 2; i += blockDim.x)
    result[(TO_DEVICE ? device : canonical) + i] = from[(TO_DEVICE ? canonical : device) + i];
  __syncthreads();
  for (int i = threadIdx.x; i < TILE_WORDS / 4; i += blockDim.x) ((uint4*)(out + tile))[i] = ((const uint4*)result)[i];
}

}  // namespace longleaf
