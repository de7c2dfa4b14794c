// Split, for 8 query rows and more: 8x8 simdgroup matrices.
//
// Owns: ROWS query rows of one KV head x one range. A simdgroup takes 8 M rows; simdgroups that share those rows
// share the range between them: each takes its part of every block, and they merge once at the end.
// Loads: a lane owns one token and a quarter of its channels, N octets in a row: one 16-byte load of nibbles at
// D = 128. The order of channels in a contraction is free, so the pairs that `octet` yields are used as they come:
// fragment j = 4 i + p holds, of each of the four lanes of a token, the p-th pair of its i-th octet. `queries`
// stands in that order: [fragment][8][row].
// Per 16 tokens:  S^T = K Q^T,  P = softmax(S^T transposed by three shuffles),  O += P V.
// Accumulates in float32: scores, weights, O. m, l and O are in base 2, queries come multiplied by scale log2(e).
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

using Matrix8 = simdgroup_matrix<float, 8, 8>;

inline thread float2& elements(thread Matrix8& m) {
  return reinterpret_cast<thread float2&>(m.thread_elements());
}

// Where a lane stands in an 8x8 matrix: (row, 2 quarter) and (row, 2 quarter + 1). `mirror`: which lane holds
// the elements across the diagonal, but for the last bit of row and column (lane bits 0 and 2, 3 and 4 change
// places). `first_row`: the lane of this quarter in row 0.
struct Place {
  ushort row, quarter, mirror, first_row;
  bool odd;
};
inline Place place_of(ushort lane) {
  Place p;
  p.row = (lane / 4 & 4) + lane / 2 % 4;
  p.quarter = (lane / 8 & 1) * 2 + lane % 2;
  p.mirror = (lane & 2) | (lane & 1) << 2 | (lane >> 2 & 1) | (lane & 8) << 1 | (lane & 16) >> 1;
  p.first_row = lane & 9;
  p.odd = p.row & 1;
  return p;
}

// The lane's elements of the transposed matrix: pairs of rows swap a value, then lanes change places.
inline float2 transpose(float2 x, Place place) {
  const float other = simd_shuffle_xor(place.odd ? x.x : x.y, ushort(2));
  const float2 y = place.odd ? float2(other, x.y) : float2(x.x, other);
  return float2(simd_shuffle(y.x, place.mirror), simd_shuffle(y.y, place.mirror));
}

// Reduces over the four lanes of a row.
inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

template <typename T, typename C, typename Layout, int ROWS, int SIMDGROUPS>
struct MatrixSplit {
  static constexpr constant int D = Layout::HEAD_DIM;
  static constexpr constant int N = (D / 8 + 3) / 4;                 // octets of a token per lane
  static constexpr constant int FRAGMENTS = 4 * N;                   // of 8 channels
  static constexpr constant int M = ROWS >= 16 && D <= 128 ? 2 : 1;  // 8-row matrices per simdgroup
  static constexpr constant int ROW_TILES = ROWS / (8 * M);
  static constexpr constant int STREAMS = SIMDGROUPS / ROW_TILES;    // simdgroups that share rows
  static constexpr constant int F = 2;                               // 8-token fragments per step
  static constexpr constant int CHANNELS = 8 * FRAGMENTS;            // D, padded to whole quarters
  static constexpr constant int SCRATCH = CHANNELS * ROWS;
  static constexpr constant int STATS = SIMDGROUPS * 8 * M;
  static constexpr constant bool KEEP = FRAGMENTS * M <= 16;         // queries fit registers beside O
  static_assert(ROWS % (8 * M) == 0 && SIMDGROUPS % ROW_TILES == 0, "simdgroups must divide into row tiles");
  static_assert(BLOCK_TOKENS % (STREAMS * 8 * F) == 0, "a block must divide into whole steps");

  using KeyCodes = CodeRow<Layout, typename Layout::K, N, 4>;
  using ValueCodes = CodeRow<Layout, typename Layout::V, N, 4>;
  using Dense = DenseRow<C, D, N, 4>;
  using Mean = DenseRow<half, D, N, 4>;

  static constexpr constant bool ROWS_TOGETHER = true;
  // Where a number stands in `queries`: see the head of the file.
  static int at(int row, int channel) {
    const int octet = channel / 8, c = channel % 8;
    return ((4 * (octet % N) + c % 4) * 8 + 2 * (octet / N) + c / 4) * ROWS + row;
  }

  Place place;
  int tile, stream;                  // which rows of the threadgroup's, which part of the range
  threadgroup const float* queries;  // this lane's element of the first matrix
  float2 kept[KEEP ? FRAGMENTS * M : 1];
  Matrix8 o[M * FRAGMENTS];
  float m[M], l[M];
  int low[M], high[M];               // tokens of a dense part that the lane's row sees
  int2 origins[M];                   // where the lane's channels of two query rows start in q

  void begin(Work work, threadgroup const int2* rows, ushort simdgroup, ushort lane) thread {
    place = place_of(lane);
    tile = simdgroup / STREAMS;
    stream = simdgroup % STREAMS;
    UNROLL
    for (int r = 0; r < M; r++) {
      m[r] = -INFINITY;
      l[r] = 0;
      threadgroup const int2* row = rows + 8 * (tile * M + r);
      low[r] = work.low(row[place.row]);
      high[r] = work.high(row[place.row]);
      // As an operand from the right a lane holds one channel of two rows: of quarter row / 2, element row % 2.
      const int channel = 8 * N * (place.row / 2) + 4 * (place.row % 2);
      origins[r] = int2(row[2 * place.quarter].x, row[2 * place.quarter + 1].x) * D + channel;
      UNROLL
      for (int j = 0; j < FRAGMENTS; j++) {
        elements(o[r * FRAGMENTS + j]) = float2(0);
      }
    }
  }

  float2 load_query(int j, int r) const thread {
    return *(threadgroup const float2*)(queries + 8 * j * ROWS + 8 * r);
  }

  void set_queries(threadgroup const float* rows) thread {
    queries = rows + 8 * M * tile + place.row * ROWS + 2 * place.quarter;
    if (KEEP) {
      UNROLL
      for (int j = 0; j < FRAGMENTS; j++) {
        UNROLL
        for (int r = 0; r < M; r++) {
          kept[KEEP ? j * M + r : 0] = load_query(j, r);
        }
      }
    }
  }

  // s[r * F + f] += K_f Q_r^T
  template <typename Row>
  void score(const thread Row* k, thread Matrix8* s) thread {
    UNROLL
    for (int i = 0; i < N; i++) {
      float2 pairs[F][4];
      UNROLL
      for (int f = 0; f < F; f++) {
        k[f].octet(i, pairs[f]);
      }
      UNROLL
      for (int p = 0; p < 4; p++) {
        UNROLL
        for (int r = 0; r < M; r++) {
          const int j = 4 * i + p;
          Matrix8 q;
          elements(q) = KEEP ? kept[KEEP ? j * M + r : 0] : load_query(j, r);
          UNROLL
          for (int f = 0; f < F; f++) {
            Matrix8 a;
            elements(a) = pairs[f][p];
            simdgroup_multiply_accumulate(s[r * F + f], a, q, s[r * F + f]);
          }
        }
      }
    }
  }

  // Weights of the F x 8 tokens at `token` from their scores, then O += P V.
  template <bool MASK, typename Row>
  void accumulate(thread Matrix8* s, const thread Row* v, int token) thread {
    UNROLL
    for (int r = 0; r < M; r++) {
      float2 x[F];
      float top = m[r];
      UNROLL
      for (int f = 0; f < F; f++) {
        x[f] = transpose(elements(s[r * F + f]), place);
        if (MASK) {
          const int t = token + 8 * f + 2 * place.quarter;
          x[f].x = t >= low[r] && t < high[r] ? x[f].x : -INFINITY;
          x[f].y = t + 1 >= low[r] && t + 1 < high[r] ? x[f].y : -INFINITY;
        }
        top = max(top, max(x[f].x, x[f].y));
      }
      top = row_max(top);
      const float base = top == -INFINITY ? 0.0f : top;
      if (simd_any(top > m[r])) {
        const float shrink = fast::exp2(m[r] - base);
        l[r] *= shrink;
        UNROLL
        for (int j = 0; j < FRAGMENTS; j++) {
          elements(o[r * FRAGMENTS + j]) *= shrink;
        }
        m[r] = top;
      }
      UNROLL
      for (int f = 0; f < F; f++) {
        x[f] = float2(fast::exp2(x[f].x - base), fast::exp2(x[f].y - base));
        l[r] += x[f].x + x[f].y;
        elements(s[r * F + f]) = x[f];
      }
    }
    UNROLL
    for (int f = 0; f < F; f++) {
      UNROLL
      for (int i = 0; i < N; i++) {
        float2 pairs[4];
        v[f].octet(i, pairs);
        UNROLL
        for (int p = 0; p < 4; p++) {
          Matrix8 b;
          elements(b) = pairs[p];
          UNROLL
          for (int r = 0; r < M; r++) {
            thread Matrix8& out = o[r * FRAGMENTS + 4 * i + p];
            simdgroup_multiply_accumulate(out, s[r * F + f], b, out);
          }
        }
      }
    }
  }

  // What the means of 8 blocks from `first` on add to the scores, from the queries as they came: row n of `means` is
  // block n.
  void mean_scores(const device uint* tiles, size_t stride, int first, int last, const device T* q, float scale,
                   thread Matrix8* means) thread {
    const device uint* block = tiles + min(first + place.row, last - 1) * stride;
    Mean row;
    row.load((const device half*)(block + Layout::K_MEAN), true, place.quarter * N);
    UNROLL
    for (int i = 0; i < N; i++) {
      float2 pairs[4];
      row.octet(i, pairs);
      UNROLL
      for (int p = 0; p < 4; p++) {
        Matrix8 a;
        elements(a) = pairs[p];
        UNROLL
        for (int r = 0; r < M; r++) {
          const device T* x = q + 8 * i + p;
          const bool there = !Mean::PADDED || place.row / 2 * N + i < D / 8;
          Matrix8 b;
          elements(b) = there ? float2(float(x[origins[r].x]), float(x[origins[r].y])) : float2(0);
          simdgroup_multiply_accumulate(means[r], a, b, means[r]);
        }
      }
    }
    UNROLL
    for (int r = 0; r < M; r++) {
      elements(means[r]) *= scale;
    }
  }

  // Blocks [first, last) of `tiles`, `stride` words apart.
  void blocks(const device uint* tiles, size_t stride, int first, int last, const device T* q,
              float scale) thread {
    for (int at = first; at < last; at += 8) {
      Matrix8 means[M];
      UNROLL
      for (int r = 0; r < M; r++) {
        elements(means[r]) = float2(0);
      }
      if (Layout::ROTATED) {
        mean_scores(tiles, stride, at, last, q, scale, means);
      }
      for (int n = 0; n < min(8, last - at); n++) {
        // This lane's place in the first row of its stream. V's scales stand V_SCALES - K_SCALES words behind K's.
        const int octet = place.quarter * N, row = stream * (BLOCK_TOKENS / STREAMS) + place.row;
        const device uint* tile = tiles + (at + n) * stride;
        const device uint* k_codes = tile + row * Layout::K_WORDS + KeyCodes::words_at(octet);
        const device uint* v_codes = tile + Layout::V_CODES + row * Layout::V_WORDS + ValueCodes::words_at(octet);
        const device half* scales = (const device half*)(tile + Layout::K_SCALES);
        scales += row * Layout::GROUPS + KeyCodes::scales_at(octet);
        const ushort from = (n & 4) * 4 + (n & 3) * 2 + place.first_row;
        float2 block_scores[M];
        UNROLL
        for (int r = 0; r < M; r++) {
          const float2 x = elements(means[r]);
          block_scores[r] = float2(simd_shuffle(x.x, from), simd_shuffle(x.y, from));
        }
        for (int t = 0; t < BLOCK_TOKENS / STREAMS; t += 8 * F) {
          KeyCodes k[F];
          ValueCodes v[F];
          UNROLL
          for (int f = 0; f < F; f++) {
            const device half* f_scales = scales + 8 * f * Layout::GROUPS;
            k[f].load(k_codes + 8 * f * Layout::K_WORDS, f_scales, octet);
            f_scales += 2 * (Layout::V_SCALES - Layout::K_SCALES);
            v[f].load(v_codes + 8 * f * Layout::V_WORDS, f_scales, octet);
          }
          k_codes += 8 * F * Layout::K_WORDS;
          v_codes += 8 * F * Layout::V_WORDS;
          scales += 8 * F * Layout::GROUPS;
          Matrix8 s[M * F];
          UNROLL
          for (int r = 0; r < M; r++) {
            UNROLL
            for (int f = 0; f < F; f++) {
              elements(s[r * F + f]) = block_scores[r];
            }
          }
          score(k, s);
          accumulate<false>(s, v, 0);
        }
      }
    }
  }

  // keys, values: (tokens, D), of which [first, last) are this threadgroup's.
  void dense(const device C* keys, const device C* values, int first, int last) thread {
    for (int t = first + stream * 8 * F; t < last; t += STREAMS * 8 * F) {
      Dense k[F], v[F];
      Matrix8 s[M * F];
      UNROLL
      for (int f = 0; f < F; f++) {
        const int token = t + 8 * f + place.row;
        k[f].load(keys + size_t(token) * D, token < last, place.quarter * N);
        v[f].load(values + size_t(token) * D, token < last, place.quarter * N);
      }
      UNROLL
      for (int r = 0; r < M * F; r++) {
        elements(s[r]) = float2(0);
      }
      score(k, s);
      accumulate<true>(s, v, t);
    }
  }

  static int stat(int row, int stream) { return (row / (8 * M) * STREAMS + stream) * 8 * M + row % (8 * M); }

  // Merges the streams in `out` (ROWS x D, over the queries). `stats`: m and l of every row and stream.
  void merge(threadgroup float* out, threadgroup float* stats) thread {
    UNROLL
    for (int r = 0; r < M; r++) {
      l[r] = row_sum(l[r]);
      if (place.quarter == 0) {
        const int i = stat(8 * (tile * M + r) + place.row, stream);
        stats[i] = m[r];
        stats[STATS + i] = l[r];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float shrink[M];
    UNROLL
    for (int r = 0; r < M; r++) {
      float top = -INFINITY;
      UNROLL
      for (int n = 0; n < STREAMS; n++) {
        top = max(top, stats[stat(8 * (tile * M + r) + place.row, n)]);
      }
      shrink[r] = m[r] == -INFINITY ? 0.0f : fast::exp2(m[r] - top);
    }
    for (int n = 0; n < STREAMS; n++) {
      if (n == stream) {
        UNROLL
        for (int r = 0; r < M; r++) {
          UNROLL
          for (int j = 0; j < FRAGMENTS; j++) {
            const int channel = 8 * (place.quarter * N + j / 4) + j % 4;
            threadgroup float* x = out + (8 * (tile * M + r) + place.row) * D + channel;
            const float2 y = elements(o[r * FRAGMENTS + j]) * shrink[r];
            if (channel < D) {
              x[0] = n == 0 ? y.x : x[0] + y.x;
              x[4] = n == 0 ? y.y : x[4] + y.y;
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
};
