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

// The scale among the candidates that leaves the smallest squared error in a group of W tokens.
// y: [channel][128] at the first of the tokens.
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

// x: [channel][128], rotated here into y. Writes codes [token][word] and scales [token][group].
static void encode_half_tile(const float* x, float* y, const Recode& job, const Layout& at, uint32_t* codes,
                             uint32_t* scales) {
  multiply(job.rotation_transposed, x, y, at.head_dim, kBlockTokens, at.head_dim);
  uint16_t* scale_out = (uint16_t*)scales;
  for (int g = 0; g < at.num_groups; ++g)
    for (int t = 0; t < kBlockTokens; t += W) {
      const float* group = y + g * at.group_size * kBlockTokens + t;
      const vf scale = best_scale(group, at.group_size);
      const vh stored = to_half(scale);
      for (int l = 0; l < W; ++l) memcpy(scale_out + (t + l) * at.num_groups + g, (const char*)&stored + 2 * l, 2);
      const vf divisor = vmax(scale, splat(1e-30f));
      for (int w = 0; w < at.group_size / 8; ++w) {
        vu word = {};
        for (int j = 0; j < 8; ++j) {
          const vf ratio = load(group + (8 * w + j) * kBlockTokens) / divisor;
          const vf code = floor_of(vmin(vmax(ratio, splat(-8)), splat(7.5f))) + 8.0f;
          word |= (vu)__builtin_convertvector(code, vi) << 4 * j;
        }
        for (int l = 0; l < W; ++l) codes[(t + l) * at.row_words + g * (at.group_size / 8) + w] = word[l];
      }
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

static void encode(const Recode& job, int tile, float* scratch) {
  const Layout at(job.head_dim);
  const int dim = job.head_dim, head = tile % job.num_kv_heads, block = tile / job.num_kv_heads;
  uint32_t* out = job.tiles + (int64_t)tile * at.tile_words();
  float *x = scratch, *y = scratch + kBlockTokens * dim;
  read_block(job.k, head, block, dim, y, x);
  uint16_t* mean_out = (uint16_t*)(out + at.codes_words + at.scales_words);
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
  encode_half_tile(x, y, job, at, out, out + at.codes_words);
  read_block(job.v, head, block, dim, y, x);
  out += at.k_words();
  encode_half_tile(x, y, job, at, out, out + at.codes_words);
}

static void decode_half_tile(const uint32_t* codes, const uint32_t* scales, const float* mean, const Recode& job,
                             const Layout& at, const Tensor& to, int head, int block, float* x, float* y) {
  const int dim = at.head_dim, group_words = at.group_size / 8;
  for (int t = 0; t < kBlockTokens; ++t)
    for (int g = 0; g < at.num_groups; ++g) {
      vh half = {};
      memcpy(&half, (const char*)scales + 2 * (t * at.num_groups + g), 2);
      const float scale = from_half(half)[0];
      for (int w = 0; w < group_words; ++w) {
        const uint32_t word = codes[t * at.row_words + g * group_words + w];
        float* out = x + t * dim + g * at.group_size + 8 * w;
        for (int j = 0; j < 8; ++j) out[j] = ((float)(int32_t)(word >> 4 * j & 15) - kMidrise) * scale;
      }
    }
  multiply(x, job.rotation_transposed, y, kBlockTokens, dim, dim);
  for (int t = 0; t < kBlockTokens; ++t) {
    float* row = y + t * dim;
    if (mean)
      for (int c = 0; c < dim; c += W) store(row + c, load(row + c) + load(mean + c));
    const int64_t element = head * to.stride[1] + ((int64_t)block * kBlockTokens + t) * to.stride[2];
    narrow((char*)to.data + element * (to.dtype == kFloat32 ? 4 : 2), row, to.dtype, dim);
  }
}

static void decode(const Recode& job, int tile, float* scratch) {
  const Layout at(job.head_dim);
  const int head = tile % job.num_kv_heads, block = tile / job.num_kv_heads;
  const uint32_t* in = job.tiles + (int64_t)tile * at.tile_words();
  float *x = scratch, *y = x + kBlockTokens * job.head_dim, *mean = y + kBlockTokens * job.head_dim;
  widen(mean, in + at.codes_words + at.scales_words, kFloat16, job.head_dim);
  decode_half_tile(in, in + at.codes_words, mean, job, at, job.k, head, block, x, y);
  in += at.k_words();
  decode_half_tile(in, in + at.codes_words, nullptr, job, at, job.v, head, block, x, y);
}

static int64_t recode_scratch(int head_dim) { return (2 * kBlockTokens + 1) * (int64_t)head_dim; }

}  // namespace
}  // namespace longleaf
