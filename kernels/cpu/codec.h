// One tile encoded or decoded: kernels/codec.py, step by step, with 128 tokens in the lanes.
#pragma once
#include "job.h"
#include "simd.h"

namespace longleaf {
namespace {

constexpr float kFloat16Max = 65504.0f;
constexpr int kScaleSteps = 12;  // candidates 0.24, 0.26 ... 0.46 of a group's RMS

INLINE vf round_to_half(vf x) { return from_half(to_half(x)); }

INLINE vf square_root(vf x) {
  for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

INLINE vf floor_of(vf x) {  // of what a 32-bit integer holds
  const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
  return whole - (whole > x ? splat(1) : vf{});
}

// To the nearest integer, ties to the even one.
INLINE vf round_of(vf x) {
  const vu sign = bits(x) & 0x80000000u;
  const vf magnitude = value(bits(x) ^ sign);
  const vf whole = (magnitude + 0x1p23f) - 0x1p23f;
  return magnitude < 0x1p23f ? value(bits(whole) | sign) : x;
}

// The scale and, of affine codes, the bias of W tokens' group; x ≈ code · scale + bias or (code − midrise) · scale.
struct Affine {
  vf scale, bias;
};

// Groups below are [channel][128], from the first of W tokens.

// Of 4-bit midrise codes: the scale among the candidates that leaves the smallest squared error.
INLINE vf best_scale(const float* y, int group_size) {
  vf squares = {};
  for (int c = 0; c < group_size; ++c) {
    const vf x = load(y + c * kBlockTokens);
    squares += x * x;
  }
  const vf rms = square_root(squares / (float)group_size);
  vf best = rms, least = splat(__builtin_inff());
  for (int step = 0; step < kScaleSteps; ++step) {
    const vf scale = round_to_half(vmin(rms * (float)(0.24 + 0.02 * step), splat(kFloat16Max)));
    const vf inverse = 1.0f / vmax(scale, splat(1e-30f));
    const vf magic = splat(12582912.0f);  // adding it rounds to an integer
    const vf half = scale * 0.5f;
    vf error = {};
    for (int c = 0; c < group_size; ++c) {
      const vf x = load(y + c * kBlockTokens);
      const vf level = (vmin(vmax(x * inverse - 0.5f, splat(-8)), splat(7)) + magic) - magic;
      const vf e = level * scale + (half - x);
      error += e * e;
    }
    best = error < least ? scale : best;
    least = error < least ? error : least;
  }
  return round_to_half(best);
}

// Of 8-bit midrise codes: the one that reaches the largest value.
INLINE vf reaching_scale(const float* y, int group_size) {
  vf top = {};
  for (int c = 0; c < group_size; ++c) {
    const vf x = load(y + c * kBlockTokens);
    top = vmax(x, vmax(-x, top));
  }
  return round_to_half(vmin(top / kMidrise<8>, splat(kFloat16Max)));
}

// Of 4-bit affine codes: what mx.quantize chooses, in its own steps.
INLINE Affine affine_of(const float* y, int group_size) {
  vf low = splat(__builtin_inff()), high = -low;
  for (int c = 0; c < group_size; ++c) {
    const vf x = load(y + c * kBlockTokens);
    low = vmin(x, low);
    high = vmax(x, high);
  }
  const auto below = vmax(low, -low) > vmax(high, -high);
  const vf magnitude = vmax((high - low) / 15.0f, splat(1e-7f));
  const vf first = below ? magnitude : -magnitude;
  const vf edge = below ? low : high;
  const vf steps = round_of(edge / first);
  return {steps != 0.0f ? edge / steps : first, steps != 0.0f ? edge : vf{}};
}

INLINE void put_halves(vf x, uint16_t* to, int stride) {
  const vh stored = to_half(vmin(vmax(x, splat(-kFloat16Max)), splat(kFloat16Max)));
  for (int l = 0; l < W; ++l) memcpy(to + l * stride, (const char*)&stored + 2 * l, 2);
}

template <int BITS>
INLINE vf midrise_code(vf x, vf divisor) {
  constexpr float middle = 1 << (BITS - 1);
  return floor_of(vmin(vmax(x / divisor, splat(-middle)), splat(middle - 0.5f))) + middle;
}

INLINE vf affine_code(vf x, const Affine& to) {
  return vmin(vmax(round_of((x - to.bias) / to.scale), splat(0)), splat(15));
}

// Codes of W tokens' group to [token][word].
template <int BITS, class CodeOf>
INLINE void put_codes(const float* group, const Codes& at, uint32_t* to, CodeOf code_of) {
  constexpr int per_word = kCodesPerWord<BITS>;
  for (int w = 0; w < at.group_words; ++w) {
    vu word = {};
    for (int j = 0; j < per_word; ++j)
      word |= (vu)__builtin_convertvector(code_of(load(group + (per_word * w + j) * kBlockTokens)), vi) << BITS * j;
    for (int l = 0; l < W; ++l) to[l * at.row_words + w] = word[l];
  }
}

// x: [channel][128], rotated here into y if the codes are. Writes the codes [token][word] at `out`, and behind them
// scales [token][group], and biases.
static void encode_half_tile(const float* x, float* y, const Recode& job, const Layout& at, const Codes& codes,
                             uint32_t* out) {
  if (at.rotated) multiply(job.rotation_transposed, x, y, at.head_dim, kBlockTokens, at.head_dim);
  const float* numbers = at.rotated ? y : x;
  uint16_t* scales = (uint16_t*)(out + codes.words);
  uint16_t* biases = scales + 2 * at.scales_words;
  for (int g = 0; g < at.num_groups; ++g)
    for (int t = 0; t < kBlockTokens; t += W) {
      const float* group = numbers + g * at.group_size * kBlockTokens + t;
      uint32_t* to = out + t * codes.row_words + g * codes.group_words;
      const int place = t * at.num_groups + g;
      if (!at.rotated) {
        const Affine affine = affine_of(group, at.group_size);
        put_halves(affine.scale, scales + place, at.num_groups);
        put_halves(affine.bias, biases + place, at.num_groups);
        put_codes<4>(group, codes, to, [affine](vf x) { return affine_code(x, affine); });
        continue;
      }
      const vf scale = codes.bits == 8 ? reaching_scale(group, at.group_size) : best_scale(group, at.group_size);
      const vf divisor = vmax(scale, splat(1e-30f));
      put_halves(scale, scales + place, at.num_groups);
      if (codes.bits == 8) put_codes<8>(group, codes, to, [divisor](vf x) { return midrise_code<8>(x, divisor); });
      else put_codes<4>(group, codes, to, [divisor](vf x) { return midrise_code<4>(x, divisor); });
    }
}

// 128 tokens of a KV head, widened and turned to [channel][128].
static void read_block(const Tensor& x, int head, int block, int dim, float* rows, float* out) {
  for (int t = 0; t < kBlockTokens; ++t) {
    const int64_t element = head * x.stride[1] + ((int64_t)block * kBlockTokens + t) * x.stride[2];
    widen(rows + t * dim, (const char*)x.data + element * (x.dtype == kFloat32 ? 4 : 2), x.dtype, dim);
  }
  for (int t = 0; t < kBlockTokens; t += W)
    for (int c = 0; c < dim; c += 4) {
      vu quad[4];
      transpose_quad((const uint32_t*)rows + t * dim + c, dim, quad);
      for (int i = 0; i < 4; ++i) store(out + (c + i) * kBlockTokens + t, value(quad[i]));
    }
}

// The mean over tokens of x, [channel][128]: written in float16, and taken from x.
static void subtract_mean(float* x, int dim, uint16_t* mean_out) {
  float mean[W];
  for (int c = 0; c < dim; c += W) {
    for (int i = 0; i < W; ++i) {
      vf total = {};
      for (int t = 0; t < kBlockTokens; t += W) total += load(x + (c + i) * kBlockTokens + t);
      mean[i] = sum(total) / kBlockTokens;
    }
    const vh stored = to_half(vmin(vmax(load(mean), splat(-kFloat16Max)), splat(kFloat16Max)));
    store_half(mean_out + c, stored);
    const vf rounded = from_half(stored);
    for (int i = 0; i < W; ++i)
      for (int t = 0; t < kBlockTokens; t += W) {
        float* at_token = x + (c + i) * kBlockTokens + t;
        store(at_token, load(at_token) - rounded[i]);
      }
  }
}

static void encode(const Recode& job, int tile, float* scratch) {
  const Layout at(job.head_dim, job.coding);
  const int dim = job.head_dim, head = tile % job.num_kv_heads, block = tile / job.num_kv_heads;
  uint32_t* out = job.tiles + (int64_t)tile * at.tile_words();
  float *x = scratch, *y = scratch + kBlockTokens * dim;
  read_block(job.k, head, block, dim, y, x);
  if (at.rotated) subtract_mean(x, dim, (uint16_t*)(out + at.k.words + at.scales_words));
  encode_half_tile(x, y, job, at, at.k, out);
  read_block(job.v, head, block, dim, y, x);
  encode_half_tile(x, y, job, at, at.v, out + at.k_words());
}

INLINE float one_half(const void* p) {
  vh half = {};
  memcpy(&half, p, 2);
  return from_half(half)[0];
}

// `in`: codes, scales, and biases. `mean`: of keys, or null.
static void decode_half_tile(const uint32_t* in, const Codes& codes, const float* mean, const Recode& job,
                             const Layout& at, const Tensor& to, int head, int block, float* x, float* y) {
  const int dim = at.head_dim, per_word = 32 / codes.bits;
  const uint32_t mask = codes.bits == 8 ? 255 : 15;
  const float middle = at.rotated ? codes.bits == 8 ? kMidrise<8> : kMidrise<4> : 0;
  const uint16_t* scales = (const uint16_t*)(in + codes.words);
  for (int t = 0; t < kBlockTokens; ++t)
    for (int g = 0; g < at.num_groups; ++g) {
      const uint16_t* place = scales + t * at.num_groups + g;
      const float scale = one_half(place), bias = at.rotated ? 0 : one_half(place + 2 * at.scales_words);
      for (int w = 0; w < codes.group_words; ++w) {
        const uint32_t word = in[t * codes.row_words + g * codes.group_words + w];
        float* out = x + t * dim + g * at.group_size + per_word * w;
        for (int j = 0; j < per_word; ++j)
          out[j] = ((float)(int32_t)(word >> codes.bits * j & mask) - middle) * scale + bias;
      }
    }
  if (at.rotated) multiply(x, job.rotation_transposed, y, kBlockTokens, dim, dim);
  float* rows = at.rotated ? y : x;
  for (int t = 0; t < kBlockTokens; ++t) {
    float* row = rows + t * dim;
    if (mean)
      for (int c = 0; c < dim; c += W) store(row + c, load(row + c) + load(mean + c));
    const int64_t element = head * to.stride[1] + ((int64_t)block * kBlockTokens + t) * to.stride[2];
    narrow((char*)to.data + element * (to.dtype == kFloat32 ? 4 : 2), row, to.dtype, dim);
  }
}

static void decode(const Recode& job, int tile, float* scratch) {
  const Layout at(job.head_dim, job.coding);
  const int head = tile % job.num_kv_heads, block = tile / job.num_kv_heads;
  const uint32_t* in = job.tiles + (int64_t)tile * at.tile_words();
  float *x = scratch, *y = x + kBlockTokens * job.head_dim, *mean = y + kBlockTokens * job.head_dim;
  if (at.rotated) widen(mean, in + at.k.words + at.scales_words, kFloat16, job.head_dim);
  decode_half_tile(in, at.k, at.rotated ? mean : nullptr, job, at, job.k, head, block, x, y);
  decode_half_tile(in + at.k_words(), at.v, nullptr, job, at, job.v, head, block, x, y);
}

static int64_t recode_scratch(int head_dim) { return (2 * kBlockTokens + 1) * (int64_t)head_dim; }

}  // namespace
}  // namespace longleaf
