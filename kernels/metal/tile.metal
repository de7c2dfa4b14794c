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

// A scale, and what it makes of the offsets that the two places of a code in a half bring along.
struct Scale {
  float scale, low, high;
};
inline Scale scale_of(half x) {
  const float scale = float(x);
  return {scale, -1031.5f * scale, -71.5f * scale};
}

// Codes and scale of one word to its numbers: out[p] = channels (p, p + 4).
inline void dequantize(uint word, Scale s, thread float2* out) {
  const uint upper = word >> 8;
  const half2 a = as_type<half2>((word & 0x000f000fu) | 0x64006400u);
  const half2 b = as_type<half2>((word & 0x00f000f0u) | 0x54005400u);
  const half2 c = as_type<half2>((upper & 0x000f000fu) | 0x64006400u);
  const half2 d = as_type<half2>((upper & 0x00f000f0u) | 0x54005400u);
  out[0] = float2(fma(float(a.x), s.scale, s.low), fma(float(a.y), s.scale, s.low));
  out[1] = float2(fma(float(b.x), s.scale, s.high), fma(float(b.y), s.scale, s.high));
  out[2] = float2(fma(float(c.x), s.scale, s.low), fma(float(c.y), s.scale, s.low));
  out[3] = float2(fma(float(d.x), s.scale, s.high), fma(float(d.y), s.scale, s.high));
}

// A lane's share of one token's codes: N consecutive words, from word `first` of its row. LANES lanes share a row;
// where they hold more than it has, the words past its end are zeros.
template <int D, int N, int LANES>
struct CodeRow {
  static constexpr constant int WORDS = Tile<D>::WORDS;
  static constexpr constant bool PADDED = N * LANES != WORDS;
  // The widest load that every row and every lane's share is aligned to.
  static constexpr constant int VEC = WORDS % 4 == 0 && N % 4 == 0 ? 4 : WORDS % 2 == 0 && N % 2 == 0 ? 2 : 1;
  static constexpr constant bool ONE_SCALE = Tile<D>::GROUP_WORDS % N == 0;
  uint codes[N];
  Scale scales[ONE_SCALE ? 1 : N];

  // Where a lane's share starts, from the row's start: of codes, of scales.
  static int words_at(int first) { return PADDED ? min(first, WORDS - 1) : first; }
  static int scales_at(int first) { return ONE_SCALE ? words_at(first) / Tile<D>::GROUP_WORDS : 0; }

  // words, row_scales: from words_at(first) and scales_at(first) of the row.
  void load(const device uint* words, const device half* row_scales, int first) {
    UNROLL
    for (int i = 0; i < N; i += VEC) {
      if (PADDED && first + i >= WORDS) {
        UNROLL
        for (int j = 0; j < VEC; j++) {
          codes[i + j] = 0;
        }
      } else if (VEC == 4) {
        const uint4 x = *(const device uint4*)(words + i);
        codes[i] = x[0];
        codes[i + VEC / 4] = x[1];
        codes[i + VEC / 2] = x[2];
        codes[i + VEC - 1] = x[3];
      } else if (VEC == 2) {
        const uint2 x = *(const device uint2*)(words + i);
        codes[i] = x[0];
        codes[i + VEC - 1] = x[1];
      } else {
        codes[i] = words[i];
      }
    }
    if (ONE_SCALE) {
      scales[0] = scale_of(row_scales[0]);
    } else {
      UNROLL
      for (int i = 0; i < N; i++) {
        scales[ONE_SCALE ? 0 : i] = scale_of(row_scales[min(first + i, WORDS - 1) / Tile<D>::GROUP_WORDS]);
      }
    }
  }

  void words(int i, thread float2* out) const thread {
    dequantize(codes[i], scales[ONE_SCALE ? 0 : i], out);
  }
};

// The same of a dense row of D numbers, from its start; a token that isn't there is zeros.
template <typename T, int D, int N, int LANES>
struct DenseRow {
  static constexpr constant bool PADDED = N * LANES != D / 8;
  vec<T, 4> numbers[2 * N];

  void load(const device T* row, bool there, int first) {
    UNROLL
    for (int i = 0; i < N; i++) {
      if (there && (!PADDED || first + i < D / 8)) {
        numbers[2 * i] = *(const device vec<T, 4>*)(row + 8 * (first + i));
        numbers[2 * i + 1] = *(const device vec<T, 4>*)(row + 8 * (first + i) + 4);
      } else {
        numbers[2 * i] = vec<T, 4>(T(0));
        numbers[2 * i + 1] = vec<T, 4>(T(0));
      }
    }
  }

  void words(int i, thread float2* out) const thread {
    UNROLL
    for (int p = 0; p < 4; p++) {
      out[p] = float2(float(numbers[2 * i][p]), float(numbers[2 * i + 1][p]));
    }
  }
};
