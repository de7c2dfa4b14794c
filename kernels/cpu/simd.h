// Vectors of LANES floats in the compiler's own vector types, so that one text serves every instruction set.
#pragma once
#include <stdint.h>
#include <string.h>
#if LANES == 16
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace longleaf {
namespace {

constexpr int W = LANES;
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

// Every load may be unaligned: MLX's buffers are.
INLINE vf load(const float* p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vu bits(vf x) { return (vu)x; }
INLINE vf value(vu x) { return (vf)x; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
// Small non-negative integers only: they are the same signed and unsigned, and signed converts in one instruction.
INLINE vf to_float(vu x) { return __builtin_convertvector((vi)x, vf); }

// Code j of every lane as (code − midrise) · Places<BITS>::at[j], exactly; midrise is 7.5 or 127.5. With a table of
// 16 floats in a register any nibble costs a shift and a look-up; everything else is left where it stands, and
// its owner divides by the place.
template <int BITS>
constexpr float kMidrise = BITS == 8 ? 127.5f : 7.5f;
template <int BITS>
constexpr int kCodesPerWord = 32 / BITS;
template <int BITS>
struct Places;
template <>
struct Places<8> {
  static constexpr float at[4] = {0x1p0f, 0x1p8f, 0x1p16f, 0x1p0f};
};
#if LANES == 16
template <>
struct Places<4> {
  static constexpr float at[8] = {1, 1, 1, 1, 1, 1, 1, 1};
};
INLINE vf look_up(vu x) {
  const vf table = {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                    0.5f,  1.5f,  2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f};
  return (vf)_mm512_permutexvar_ps((__m512i)x, (__m512)table);
}
#else
template <>
struct Places<4> {
  static constexpr float at[8] = {0x1p0f, 0x1p4f, 0x1p8f, 0x1p12f, 0x1p16f, 0x1p20f, 0x1p24f, 0x1p0f};
};
#endif
template <int BITS>
INLINE vf centred(vu x, int j) {
#if LANES == 16
  if constexpr (BITS == 4) return look_up(x >> 4 * j);
#endif
  constexpr int last = kCodesPerWord<BITS> - 1;
  constexpr uint32_t mask = (1u << BITS) - 1;
  return to_float(j < last ? x & mask << BITS * j : x >> (32 - BITS)) - kMidrise<BITS> * Places<BITS>::at[j];
}

// Halves onto halves, so that the compiler keeps them in vectors.
INLINE float sum(vf x) {
  float a[W];
  store(a, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) a[i] += a[i + n];
  return a[0];
}

INLINE float max_of(vf x) {
  float a[W];
  store(a, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
  return a[0];
}

// Float16 bits in the low half of each lane, the rest 0.
INLINE vf from_half(vu x) {
  const vu magnitude = (x & 0x7fff) << 13;
  const vf normal = value(magnitude + (112u << 23));
  const vf subnormal = value(magnitude + (113u << 23)) - 0x1p-14f;
  vf y = magnitude < (1u << 23) ? subnormal : normal;
  y = magnitude >= (31u << 23) ? value(magnitude | 0x7f800000u) : y;
  return value(bits(y) | (x & 0x8000) << 16);
}

// Rounds to nearest even; what overflows becomes infinite, NaN stays NaN.
INLINE vh to_half(vf f) {
  const vu x = bits(f), magnitude = x & 0x7fffffff;
  const vu normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const vu subnormal = bits(value(magnitude) + 0.5f) - (126u << 23);
  vu y = magnitude < (113u << 23) ? subnormal : normal;
  y = magnitude >= 0x477ff000u ? (vu{} + 0x7c00) : y;
  y = magnitude > 0x7f800000u ? (vu{} + 0x7e00) : y;
  return __builtin_convertvector(y | (x >> 16 & 0x8000), vh);
}

INLINE vf from_half(vh h) { return from_half(__builtin_convertvector(h, vu)); }

INLINE vf from_bfloat(vh h) { return value(__builtin_convertvector(h, vu) << 16); }

INLINE vh to_bfloat(vf f) {
  const vu x = bits(f);
  const vu y = (x & 0x7fffffff) > 0x7f800000u ? (x >> 16 | 0x40) : ((x + 0x7fff + (x >> 16 & 1)) >> 16);
  return __builtin_convertvector(y, vh);
}

INLINE vh load_half(const void* p) { vh x; memcpy(&x, p, sizeof x); return x; }
INLINE void store_half(void* p, vh x) { memcpy(p, &x, sizeof x); }

// exp(x) for x <= 0 within two units of the last place; NaN stays NaN, what would be subnormal becomes 0.
INLINE vf exp_negative(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf whole = x * 1.44269504088896341f + magic;
  const vf n = whole - magic;
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf y = value(bits(p) + (bits(whole) << 23));
  return x < -87.3f ? vf{} : y;
}

// 4 words of W tokens to W tokens of 4 words: token t of word w lands in lane t of out[w].
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if LANES == 16
#define LOW32 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH32 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW64 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH64 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif LANES == 8
#define LOW32 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH32 2, 10, 3, 11, 6, 14, 7, 15
#define LOW64 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH64 2, 3, 10, 11, 6, 7, 14, 15
#elif LANES == 4
#define LOW32 0, 4, 1, 5
#define HIGH32 2, 6, 3, 7
#define LOW64 0, 1, 4, 5
#define HIGH64 2, 3, 6, 7
#endif
INLINE void transpose_quad(const uint32_t* words, int stride, vu out[4]) {
  vu row[4];  // 128-bit lane k of row[i] holds token 4 k + i
  for (int i = 0; i < 4; ++i) {
    uint32_t quads[W];
    for (int k = 0; k < W / 4; ++k) memcpy(quads + 4 * k, words + (4 * k + i) * stride, 16);
    memcpy(&row[i], quads, sizeof quads);
  }
  const vu a = SHUFFLE(row[0], row[1], LOW32), b = SHUFFLE(row[2], row[3], LOW32);
  const vu c = SHUFFLE(row[0], row[1], HIGH32), d = SHUFFLE(row[2], row[3], HIGH32);
  out[0] = SHUFFLE(a, b, LOW64);
  out[1] = SHUFFLE(a, b, HIGH64);
  out[2] = SHUFFLE(c, d, LOW64);
  out[3] = SHUFFLE(c, d, HIGH64);
}

// n values (a multiple of 16) of any dtype to float32.
INLINE void widen(float* to, const void* from, int32_t dtype, int n) {
  const char* p = (const char*)from;
  if (dtype == 0) memcpy(to, p, 4 * (size_t)n);
  else if (dtype == 1) for (int i = 0; i < n; i += W) store(to + i, from_half(load_half(p + 2 * i)));
  else for (int i = 0; i < n; i += W) store(to + i, from_bfloat(load_half(p + 2 * i)));
}

INLINE void narrow(void* to, const float* from, int32_t dtype, int n) {
  char* p = (char*)to;
  if (dtype == 0) memcpy(p, from, 4 * (size_t)n);
  else if (dtype == 1) for (int i = 0; i < n; i += W) store_half(p + 2 * i, to_half(load(from + i)));
  else for (int i = 0; i < n; i += W) store_half(p + 2 * i, to_bfloat(load(from + i)));
}

// Lanes are columns: c[M][N] = a[M][K] b[K][N], row-major, N a multiple of 16.
template <int ROWS, int VECS>
INLINE void multiply_panel(const float* a, const float* b, float* c, int n, int k) {
  vf acc[ROWS][VECS] = {};
  for (int i = 0; i < k; ++i)
    for (int v = 0; v < VECS; ++v) {
      const vf x = load(b + (int64_t)i * n + v * W);
      for (int r = 0; r < ROWS; ++r) acc[r][v] += x * a[r * k + i];
    }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(c + r * n + v * W, acc[r][v]);
}

static void multiply(const float* a, const float* b, float* c, int m, int n, int k) {
  for (int j = 0; j < n;) {
    const bool wide = n - j >= 2 * W;
    int i = 0;
    for (; i + 4 <= m; i += 4)
      if (wide) multiply_panel<4, 2>(a + i * k, b + j, c + i * n + j, n, k);
      else multiply_panel<4, 1>(a + i * k, b + j, c + i * n + j, n, k);
    for (; i < m; ++i)
      if (wide) multiply_panel<1, 2>(a + i * k, b + j, c + i * n + j, n, k);
      else multiply_panel<1, 1>(a + i * k, b + j, c + i * n + j, n, k);
    j += wide ? 2 * W : W;
  }
}

}  // namespace
}  // namespace longleaf
