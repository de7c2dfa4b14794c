// Whole blocks to tiles and back, a slice of a block's tokens at a time in threadgroup memory.
//
// Owns: the keys or the values of one KV head of one block. Rotation, error search and mean in float32.
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

template <int D>
struct Slice {
  static constexpr constant int TOKENS = D <= 64 ? 64 : D <= 128 ? 32 : D <= 256 ? 16 : 8;
};

constant constexpr float HALF_LARGEST = 65504.0f;

// The code of x / scale, as a float.
inline float code_of(float x, float inverse) {
  return clamp(floor(x * inverse) + 8.0f, 0.0f, 15.0f);
}

inline float sum8(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  x += simd_shuffle_xor(x, ushort(2));
  return x + simd_shuffle_xor(x, ushort(4));
}

// The scale of one group, which 8 lanes share, each with 8 channels (`there`) or none: of 12 shares of the group's
// RMS the one with the smallest squared error as stored, in float16.
inline float search_scale(const thread float* x, bool there, int group_size) {
  float squares = 0;
  UNROLL
  for (int i = 0; i < 8; i++) {
    squares += x[i] * x[i];
  }
  const float rms = precise::sqrt(sum8(squares) / group_size);
  float best = rms, best_error = INFINITY;
  UNROLL
  for (int step = 0; step < 12; step++) {
    const float scale = float(half(min(rms * (0.24f + 0.02f * step), HALF_LARGEST)));
    const float inverse = 1.0f / max(scale, 1e-30f);
    float error = 0;
    UNROLL
    for (int i = 0; i < 8; i++) {
      const float e = (code_of(x[i], inverse) - 7.5f) * scale - x[i];
      error += there ? e * e : 0.0f;
    }
    error = sum8(error);
    best = error < best_error ? scale : best;
    best_error = min(error, best_error);
  }
  return best;
}
