// Tokens of keys or values as a lane reads them: int4c tiles and dense arrays.
//
// A tile holds one KV head of one 128-token block (kernels/formats.py): k_codes, k_scales, k_mean, v_codes,
// v_scales; every part starts at a multiple of 16 bytes. A word holds the codes of 8 channels.
//
// `words(i)` yields the 8 numbers of a lane's i-th word as four pairs of channels (c, c + 4): a mask lifts two
// codes, 16 bits apart, into the mantissas of two halves (1024 + code, or 64 + code where the code stands
// 4 bits higher), and one fma subtracts that and scales. All three are exact: code - 7.5 has 4 bits, a scale 11.
#include <metal_stdlib>
using namespace metal;

constant constexpr int BLOCK_TOKENS = 128;

template <int D>
struct Tile {
  static constexpr constant int WORDS = D / 8;                                    // words per token
  static constexpr constant int GROUPS = (D + 63) / 64;                           // scales per token
  static constexpr constant int GROUP_WORDS = WORDS / GROUPS;                     // words per scale
  static constexpr constant int K_SCALES = BLOCK_TOKENS * WORDS;                  // in 32-bit words from the start
  static constexpr constant int K_MEAN = K_SCALES + BLOCK_TOKENS * GROUPS / 2;
  static constexpr constant int V_CODES = K_MEAN + D / 2;
  static constexpr constant int V_SCALES = V_CODES + BLOCK_TOKENS * WORDS;
  static constexpr constant int SIZE = V_SCALES + BLOCK_TOKENS * GROUPS / 2;
};

// Codes and scale of one word to its numbers: out[p] = channels (p, p + 4).
inline void dequantize(uint word, float scale, thread float2* out) {
  const float low = -1031.5f * scale, high = -71.5f * scale;
  const uint upper = word >> 8;
  const half2 a = as_type<half2>((word & 0x000f000fu) | 0x64006400u);
  const half2 b = as_type<half2>((word & 0x00f000f0u) | 0x54005400u);
  const half2 c = as_type<half2>((upper & 0x000f000fu) | 0x64006400u);
  const half2 d = as_type<half2>((upper & 0x00f000f0u) | 0x54005400u);
  out[0] = float2(fma(float(a.x), scale, low), fma(float(a.y), scale, low));
  out[1] = float2(fma(float(b.x), scale, high), fma(float(b.y), scale, high));
  out[2] = float2(fma(float(c.x), scale, low), fma(float(c.y), scale, low));
  out[3] = float2(fma(float(d.x), scale, high), fma(float(d.y), scale, high));
}

// N consecutive words of one token's codes, starting at word `first`. Words past the head size are zeros.
template <int D, int N>
struct CodeRow {
  static constexpr constant int WORDS = Tile<D>::WORDS;
  // The widest load that every row and every lane's share is aligned to.
  static constexpr constant int VEC = WORDS % 4 == 0 && N % 4 == 0 ? 4 : WORDS % 2 == 0 && N % 2 == 0 ? 2 : 1;
  static constexpr constant bool ONE_SCALE = Tile<D>::GROUP_WORDS % N == 0;
  uint codes[N];
  float scales[ONE_SCALE ? 1 : N];

  void load(const device uint* part, const device half* part_scales, int token, int first) {
    const device uint* row = part + token * WORDS + first;
    for (int i = 0; i < N; i += VEC) {
      if (first + i >= WORDS) {
        for (int j = 0; j < VEC; j++) {
          codes[i + j] = 0;
        }
      } else if (VEC == 4) {
        const uint4 x = *(const device uint4*)(row + i);
        codes[i] = x[0];
        codes[i + VEC / 4] = x[1];
        codes[i + VEC / 2] = x[2];
        codes[i + VEC - 1] = x[3];
      } else if (VEC == 2) {
        const uint2 x = *(const device uint2*)(row + i);
        codes[i] = x[0];
        codes[i + VEC - 1] = x[1];
      } else {
        codes[i] = row[i];
      }
    }
    const device half* s = part_scales + token * Tile<D>::GROUPS;
    if (ONE_SCALE) {
      scales[0] = float(s[min(first, WORDS - 1) / Tile<D>::GROUP_WORDS]);
    } else {
      for (int i = 0; i < N; i++) {
        scales[ONE_SCALE ? 0 : i] = float(s[min(first + i, WORDS - 1) / Tile<D>::GROUP_WORDS]);
      }
    }
  }

  void words(int i, thread float2* out) const thread {
    dequantize(codes[i], scales[ONE_SCALE ? 0 : i], out);
  }
};

// The same of a dense row of D numbers; a null token is zeros.
template <typename T, int D, int N>
struct DenseRow {
  vec<T, 4> numbers[2 * N];

  void load(const device T* row, bool there, int first) {
    for (int i = 0; i < N; i++) {
      if (there && first + i < D / 8) {
        numbers[2 * i] = *(const device vec<T, 4>*)(row + 8 * (first + i));
        numbers[2 * i + 1] = *(const device vec<T, 4>*)(row + 8 * (first + i) + 4);
      } else {
        numbers[2 * i] = vec<T, 4>(T(0));
        numbers[2 * i + 1] = vec<T, 4>(T(0));
      }
    }
  }

  void words(int i, thread float2* out) const thread {
    for (int p = 0; p < 4; p++) {
      out[p] = float2(float(numbers[2 * i][p]), float(numbers[2 * i + 1][p]));
    }
  }
};
