// Tokens of keys or values as a lane reads them: tiles of codes and dense arrays.
//
// A tile holds one KV head of one 128-token block (kernels/formats.py): k_codes, k_scales, k_mean, v_codes,
// v_scales; every part starts at a multiple of 16 bytes. Affine tiles have k_biases in the place of k_mean, and
// v_biases at the end. An octet is 8 channels, in one word of 4-bit codes or two of 8-bit ones.
//
// `octet(i)` yields the 8 numbers of a lane's i-th octet as four pairs of channels (c, c + 4). A mask lifts two
// codes, 16 bits apart, into the mantissas of two halves (1024 + code, or 64 + code where the code stands
// 4 bits higher), and one fma subtracts that and scales. All three are exact: code - midrise has at most 8 bits, a
// scale 11. Affine codes take a subtraction more, since a bias less 1024 scales would be rounded.
#include <metal_stdlib>
using namespace metal;


constant constexpr int BLOCK_TOKENS = 128;

// A scale, and what is added to a scaled half in either place: it takes away what the mask brought along.
struct Scale {
  float scale, low, high;
};

// The codings. `scale_of`: of a token's group, whose bias stands `bias_at` halves behind its scale.
// `numbers`: an octet's words to its numbers, out[p] = channels (p, p + 4).

struct Nibbles {  // (code - 7.5) scale
  static constexpr constant int BITS = 4;
  static Scale scale_of(const device half* x, int bias_at) {
    const float scale = float(x[0]);
    return {scale, -1031.5f * scale, -71.5f * scale};
  }
  static void numbers(const thread uint* words, Scale s, thread float2* out) {
    const uint word = words[0], upper = word >> 8;
    const half2 a = as_type<half2>((word & 0x000f000fu) | 0x64006400u);
    const half2 b = as_type<half2>((word & 0x00f000f0u) | 0x54005400u);
    const half2 c = as_type<half2>((upper & 0x000f000fu) | 0x64006400u);
    const half2 d = as_type<half2>((upper & 0x00f000f0u) | 0x54005400u);
    out[0] = float2(fma(float(a.x), s.scale, s.low), fma(float(a.y), s.scale, s.low));
    out[1] = float2(fma(float(b.x), s.scale, s.high), fma(float(b.y), s.scale, s.high));
    out[2] = float2(fma(float(c.x), s.scale, s.low), fma(float(c.y), s.scale, s.low));
    out[3] = float2(fma(float(d.x), s.scale, s.high), fma(float(d.y), s.scale, s.high));
  }
};

struct Bytes {  // (code - 127.5) scale
  static constexpr constant int BITS = 8;
  static Scale scale_of(const device half* x, int bias_at) {
    const float scale = float(x[0]);
    return {scale, -1151.5f * scale, 0.0f};
  }
  static void numbers(const thread uint* words, Scale s, thread float2* out) {
    UNROLL
    for (int odd = 0; odd < 2; odd++) {
      const half2 a = as_type<half2>((words[0] >> (8 * odd) & 0x00ff00ffu) | 0x64006400u);
      const half2 b = as_type<half2>((words[1] >> (8 * odd) & 0x00ff00ffu) | 0x64006400u);
      out[odd] = float2(fma(float(a.x), s.scale, s.low), fma(float(b.x), s.scale, s.low));
      out[odd + 2] = float2(fma(float(a.y), s.scale, s.low), fma(float(b.y), s.scale, s.low));
    }
  }
};

struct AffineNibbles {  // code scale + bias
  static constexpr constant int BITS = 4;
  static Scale scale_of(const device half* x, int bias_at) {
    const float bias = float(x[bias_at]);
    return {float(x[0]), bias, bias};
  }
  static void numbers(const thread uint* words, Scale s, thread float2* out) {
    Nibbles::numbers(words, Scale{1.0f, -1024.0f, -64.0f}, out);
    UNROLL
    for (int p = 0; p < 4; p++) {
      out[p] = fma(out[p], float2(s.scale), float2(s.low));
    }
  }
};

template <int D, int K_BITS, int V_BITS, bool AFFINE>
struct Tile {
  using K = conditional_t<AFFINE, AffineNibbles, conditional_t<K_BITS == 8, Bytes, Nibbles>>;
  using V = conditional_t<AFFINE, AffineNibbles, conditional_t<V_BITS == 8, Bytes, Nibbles>>;
  static constexpr constant bool ROTATED = !AFFINE;                               // and keys centred
  static constexpr constant int HEAD_DIM = D;
  static constexpr constant int OCTETS = D / 8;                                   // per token
  static constexpr constant int GROUPS = (D + 63) / 64;                           // scales per token
  static constexpr constant int GROUP_OCTETS = OCTETS / GROUPS;                   // per scale
  static constexpr constant int K_WORDS = OCTETS * K_BITS / 4;                    // per token
  static constexpr constant int V_WORDS = OCTETS * V_BITS / 4;
  static constexpr constant int SCALES = BLOCK_TOKENS * GROUPS / 2;               // words of scales or of biases
  static constexpr constant int K_SCALES = BLOCK_TOKENS * K_WORDS;                // in words from the start
  static constexpr constant int K_MEAN = K_SCALES + SCALES;
  static constexpr constant int V_CODES = K_MEAN + (AFFINE ? SCALES : D / 2);
  static constexpr constant int V_SCALES = V_CODES + BLOCK_TOKENS * V_WORDS;
  static constexpr constant int SIZE = V_SCALES + (AFFINE ? 2 : 1) * SCALES;
};

// A lane's share of one token's codes: N consecutive octets, from octet `first` of its row. LANES lanes share a row;
// where they hold more than it has, the octets past its end are zeros.
template <typename Layout, typename Coding, int N, int LANES>
struct CodeRow {
  static constexpr constant int OCTET_WORDS = Coding::BITS / 4;
  static constexpr constant int ROW_WORDS = Layout::OCTETS * OCTET_WORDS;
  static constexpr constant int WORDS = N * OCTET_WORDS;
  static constexpr constant bool PADDED = N * LANES != Layout::OCTETS;
  // The widest load that every row and every lane's share is aligned to.
  static constexpr constant int VEC = ROW_WORDS % 4 == 0 && WORDS % 4 == 0 ? 4
      : ROW_WORDS % 2 == 0 && WORDS % 2 == 0                               ? 2
                                                                           : 1;
  static constexpr constant bool ONE_SCALE = Layout::GROUP_OCTETS % N == 0;
  uint codes[WORDS];
  Scale scales[ONE_SCALE ? 1 : N];

  // Where a lane's share starts, from the row's start: of codes, of scales.
  static int octet_at(int first) { return PADDED ? min(first, Layout::OCTETS - 1) : first; }
  static int words_at(int first) { return octet_at(first) * OCTET_WORDS; }
  static int scales_at(int first) { return ONE_SCALE ? octet_at(first) / Layout::GROUP_OCTETS : 0; }

  // words, row_scales: from words_at(first) and scales_at(first) of the row.
  void load(const device uint* words, const device half* row_scales, int first) {
    UNROLL
    for (int i = 0; i < WORDS; i += VEC) {
      if (PADDED && first * OCTET_WORDS + i >= ROW_WORDS) {
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
    constexpr int BIAS_AT = 2 * Layout::SCALES;
    if (ONE_SCALE) {
      scales[0] = Coding::scale_of(row_scales, BIAS_AT);
    } else {
      UNROLL
      for (int i = 0; i < N; i++) {
        const int group = min(first + i, Layout::OCTETS - 1) / Layout::GROUP_OCTETS;
        scales[ONE_SCALE ? 0 : i] = Coding::scale_of(row_scales + group, BIAS_AT);
      }
    }
  }

  void octet(int i, thread float2* out) const thread {
    Coding::numbers(codes + i * OCTET_WORDS, scales[ONE_SCALE ? 0 : i], out);
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

  void octet(int i, thread float2* out) const thread {
    UNROLL
    for (int p = 0; p < 4; p++) {
      out[p] = float2(float(numbers[2 * i][p]), float(numbers[2 * i + 1][p]));
    }
  }
};
