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

inline float sum8(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  x += simd_shuffle_xor(x, ushort(2));
  return x + simd_shuffle_xor(x, ushort(4));
}

inline float max8(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  return max(x, simd_shuffle_xor(x, ushort(4)));
}

// One group is shared by 8 lanes, each with 8 of its channels (`there`) or none, which are zeros then. What follows
// finds a group's scale and bias, and a number's code from them, as a float.
struct GroupCode {
  float scale, bias;
};

template <int BITS>
float midrise_code(float x, float inverse) {
  constexpr float MIDDLE = 1 << (BITS - 1);
  return clamp(floor(x * inverse) + MIDDLE, 0.0f, 2 * MIDDLE - 1);
}

inline float inverse_of(float scale) { return 1.0f / max(scale, 1e-30f); }

// Of 12 shares of the group's RMS the one with the smallest squared error as stored, in float16.
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
    const float inverse = inverse_of(scale);
    float error = 0;
    UNROLL
    for (int i = 0; i < 8; i++) {
      const float e = (midrise_code<4>(x[i], inverse) - 7.5f) * scale - x[i];
      error += there ? e * e : 0.0f;
    }
    error = sum8(error);
    best = error < best_error ? scale : best;
    best_error = min(error, best_error);
  }
  return best;
}

// Encodes are paired with the codings of tile.metal.
template <typename Coding>
struct Encode;

template <>
struct Encode<Nibbles> {
  static GroupCode fit(const thread float* x, bool there, int group_size) {
    return {search_scale(x, there, group_size), 0.0f};
  }
  static float code(float x, GroupCode group) { return midrise_code<4>(x, inverse_of(group.scale)); }
};

template <>
struct Encode<Bytes> {
  static GroupCode fit(const thread float* x, bool there, int group_size) {
    float top = 0;
    UNROLL
    for (int i = 0; i < 8; i++) {
      top = max(top, abs(x[i]));
    }
    return {float(half(min(max8(top) / 127.5f, HALF_LARGEST))), 0.0f};
  }
  static float code(float x, GroupCode group) { return midrise_code<8>(x, inverse_of(group.scale)); }
};

// As mx.quantize: 15 steps from the end that is further from zero, moved so that a step falls on zero.
template <>
struct Encode<AffineNibbles> {
  static GroupCode fit(const thread float* x, bool there, int group_size) {
    float low = INFINITY, high = -INFINITY;
    UNROLL
    for (int i = 0; i < 8; i++) {
      low = there ? min(low, x[i]) : low;
      high = there ? max(high, x[i]) : high;
    }
    low = -max8(-low);
    high = max8(high);
    const bool below = abs(low) > abs(high);
    const float size = max((high - low) / 15.0f, 1e-7f);
    const float scale = below ? size : -size, edge = below ? low : high;
    const float steps = rint(edge / scale);
    return {steps == 0 ? scale : edge / steps, steps == 0 ? 0.0f : edge};
  }
  static float code(float x, GroupCode group) {
    return clamp(rint((x - group.bias) / group.scale), 0.0f, 15.0f);
  }
};

// Tokens [from, from + Slice) of keys or values: `numbers`, in the basis of the codes, to codes [token][word] and, of
// the slice, scales and biases.
template <typename Layout, typename Coding>
void write_codes(threadgroup const float* numbers, int from, device uint* codes, threadgroup half* scales,
                 threadgroup half* biases, int thread_index, int num_threads) {
  constexpr int D = Layout::HEAD_DIM, GROUPS = Layout::GROUPS, GROUP_OCTETS = Layout::GROUP_OCTETS;
  constexpr int ITEMS = Slice<D>::TOKENS * GROUPS, WORDS = Coding::BITS / 4, PER_WORD = 8 / WORDS;
  for (int base = 0; base < ITEMS; base += num_threads / 8) {
    const int item = min(base + thread_index / 8, ITEMS - 1), lane = thread_index % 8;
    const int token = item / GROUPS, octet = item % GROUPS * GROUP_OCTETS + lane;
    const bool there = lane < GROUP_OCTETS;
    float x[8];
    for (int i = 0; i < 8; i++) {
      x[i] = there ? numbers[token * D + 8 * octet + i] : 0.0f;
    }
    const GroupCode group = Encode<Coding>::fit(x, there, 8 * GROUP_OCTETS);
    if (there && base + thread_index / 8 == item) {
      for (int w = 0; w < WORDS; w++) {
        uint packed = 0;
        for (int i = 0; i < PER_WORD; i++) {
          packed |= uint(Encode<Coding>::code(x[w * PER_WORD + i], group)) << (Coding::BITS * i);
        }
        codes[((from + token) * Layout::OCTETS + octet) * WORDS + w] = packed;
      }
      if (lane == 0) {
        scales[item] = half(clamp(group.scale, -HALF_LARGEST, HALF_LARGEST));
        biases[item] = half(clamp(group.bias, -HALF_LARGEST, HALF_LARGEST));
      }
    }
  }
}

// The way back, of part `codes` with its scales and biases behind it.
template <typename Layout, typename Coding>
void read_slice(const device uint* codes, int from, threadgroup float* numbers, int thread_index, int num_threads) {
  constexpr int OCTETS = Layout::OCTETS, WORDS = Coding::BITS / 4;
  const device half* scales = (const device half*)(codes + BLOCK_TOKENS * OCTETS * WORDS);
  for (int i = thread_index; i < Slice<Layout::HEAD_DIM>::TOKENS * OCTETS; i += num_threads) {
    const int token = from + i / OCTETS, octet = i % OCTETS;
    uint words[WORDS];
    for (int w = 0; w < WORDS; w++) {
      words[w] = codes[(token * OCTETS + octet) * WORDS + w];
    }
    const device half* scale = scales + token * Layout::GROUPS + octet / Layout::GROUP_OCTETS;
    float2 pairs[4];
    Coding::numbers(words, Coding::scale_of(scale, 2 * Layout::SCALES), pairs);
    for (int p = 0; p < 4; p++) {
      numbers[i * 8 + p] = pairs[p].x;
      numbers[i * 8 + p + 4] = pairs[p].y;
    }
  }
}
