// Split, for up to 4 query rows: dot products.
//
// Owns: ROWS query rows of one KV head x one range. Every simdgroup takes all rows and its part of the range; they
// merge once at the end.
// Loads: LANES lanes take a token, a lane N consecutive octets of it, so that a simdgroup reads 32 / LANES whole tokens
// at once. Up to D = 256 N is 4 / ROWS: wider loads would leave q and O, 16 N ROWS numbers, no room in the 128
// registers that a lane can have. K and V are each dequantised once for all rows.
// Per 32 / ROWS tokens: every lane ends with one score (token, row), after a reduction that halves the number of
// values with every exchange; row = lane % ROWS.
// Accumulates in float32; m and l of the lane's row, O of all rows at the lane's channels.
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

template <typename T, typename C, typename Layout, int ROWS, int SIMDGROUPS>
struct VectorSplit {
  static constexpr constant int D = Layout::HEAD_DIM;
  static constexpr constant int OCTETS = Layout::OCTETS;
  static constexpr constant int SHARES = OCTETS * ROWS / 4;           // of 4 / ROWS octets, in a token
  static constexpr constant int LANES = SHARES <= 4 ? 4               // per token
      : SHARES <= 8                                 ? 8
      : SHARES <= 16                                ? 16
                                                    : 32;
  static constexpr constant int N = (OCTETS + LANES - 1) / LANES;     // octets per lane
  static constexpr constant int TOKENS = 32 / LANES;                  // read at once
  static constexpr constant int STEPS = LANES / ROWS;                 // such reads per score
  static constexpr constant int STREAMS = SIMDGROUPS;
  static constexpr constant int CHANNELS = D;
  static constexpr constant int SCRATCH = ROWS * D;
  static constexpr constant int STATS = SIMDGROUPS * ROWS;
  static_assert(BLOCK_TOKENS % (STREAMS * STEPS * TOKENS) == 0, "a block must divide into whole steps");

  using KeyCodes = CodeRow<Layout, typename Layout::K, N, LANES>;
  using ValueCodes = CodeRow<Layout, typename Layout::V, N, LANES>;
  using Dense = DenseRow<C, D, N, LANES>;
  using Mean = DenseRow<half, D, N, LANES>;

  static constexpr constant bool ROWS_TOGETHER = false;
  static int at(int row, int channel) { return row * D + channel; }

  ushort lane, octet, token;  // octet: first of this lane's; token: of the TOKENS
  ushort first_lane;          // of those that share the token
  int stream;
  float2 q[ROWS][4 * N], o[ROWS][4 * N];
  float m, l;                // of row lane % ROWS, l of this lane's tokens only
  int low, high;             // tokens of a dense part that this row sees
  int origins[ROWS];         // where the query rows start in q

  void begin(Work work, threadgroup const int2* rows, ushort simdgroup, ushort simd_lane) thread {
    lane = simd_lane;
    octet = lane % LANES * N;
    token = lane / LANES;
    first_lane = token * LANES;
    stream = simdgroup;
    m = -INFINITY;
    l = 0;
    low = work.low(rows[lane % ROWS]);
    high = work.high(rows[lane % ROWS]);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      origins[r] = rows[r].x * D;
      UNROLL
      for (int i = 0; i < 4 * N; i++) {
        o[r][i] = float2(0);
      }
    }
  }

  void set_queries(threadgroup const float* rows) thread {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int i = 0; i < 4 * N; i++) {
        const int channel = 8 * (octet + i / 4) + i % 4;
        q[r][i] = channel < D ? float2(rows[r * D + channel], rows[r * D + channel + 4]) : float2(0);
      }
    }
  }

  // Adds the dot products with one token to its ROWS of the values to reduce.
  template <typename Row>
  static void dot(const thread Row& k, const thread float2 (&with)[ROWS][4 * N], thread float* values) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      values[r] = 0;
    }
    UNROLL
    for (int i = 0; i < N; i++) {
      float2 pairs[4];
      k.octet(i, pairs);
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int p = 0; p < 4; p++) {
          values[r] = fma(with[r][4 * i + p].x, pairs[p].x, values[r]);
          values[r] = fma(with[r][4 * i + p].y, pairs[p].y, values[r]);
        }
      }
    }
  }

  // Sums LANES values over LANES lanes; lane i of them ends with value i.
  float reduce(thread float* values) const thread {
    UNROLL
    for (int n = LANES / 2; n > 0; n /= 2) {
      const bool upper = lane & n;
      UNROLL
      for (int i = 0; i < n; i++) {
        const float mine = upper ? values[i + n] : values[i], theirs = upper ? values[i] : values[i + n];
        values[i] = mine + simd_shuffle_xor(theirs, ushort(n));
      }
    }
    return values[0];
  }

  // Weights of STEPS x TOKENS tokens from this lane's score, then O += P V.
  template <typename Row>
  void accumulate(float score, const thread Row* v) thread {
    float top = score;
    UNROLL
    for (int n = ROWS; n < 32; n *= 2) {
      top = max(top, simd_shuffle_xor(top, ushort(n)));
    }
    top = max(top, m);
    const float base = top == -INFINITY ? 0.0f : top;
    if (simd_any(top > m)) {
      const float shrink = fast::exp2(m - base);
      l *= shrink;
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        const float x = simd_shuffle(shrink, ushort(r));
        UNROLL
        for (int i = 0; i < 4 * N; i++) {
          o[r][i] *= x;
        }
      }
      m = top;
    }
    const float weight = fast::exp2(score - base);
    l += weight;
    UNROLL
    for (int t = 0; t < STEPS; t++) {
      float weights[ROWS];
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        weights[r] = simd_shuffle(weight, ushort(first_lane + t * ROWS + r));
      }
      UNROLL
      for (int i = 0; i < N; i++) {
        float2 pairs[4];
        v[t].octet(i, pairs);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          UNROLL
          for (int p = 0; p < 4; p++) {
            o[r][4 * i + p] = fma(pairs[p], float2(weights[r]), o[r][4 * i + p]);
          }
        }
      }
    }
  }

  // What the means of 32 / ROWS blocks from `first` on add to the scores, from the queries as they came. A lane gets
  // that of its row and block.
  float mean_scores(const device uint* tiles, size_t stride, int first, int last, const device T* queries) thread {
    float values[LANES];
    UNROLL
    for (int t = 0; t < STEPS; t++) {
      float2 plain[ROWS][4 * N];
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int i = 0; i < 4 * N; i++) {
          const int channel = 8 * (octet + i / 4) + i % 4;
          const device T* x = queries + origins[r] + channel;
          plain[r][i] = channel < D ? float2(float(x[0]), float(x[4])) : float2(0);
        }
      }
      const int block = min(first + t * TOKENS + token, last - 1);
      Mean mean;
      mean.load((const device half*)(tiles + block * stride + Layout::K_MEAN), true, octet);
      dot(mean, plain, values + t * ROWS);
    }
    return reduce(values);
  }

  // Blocks [first, last) of `tiles`, `stride` words apart.
  void blocks(const device uint* tiles, size_t stride, int first, int last, const device T* queries,
              float scale) thread {
    constexpr int BATCH = STEPS * TOKENS;
    for (int at = first; at < last; at += BATCH) {
      const float means = Layout::ROTATED ? mean_scores(tiles, stride, at, last, queries) * scale : 0.0f;
      for (int n = 0; n < min(BATCH, last - at); n++) {
        // This lane's place in the first row of its stream. V's scales stand V_SCALES - K_SCALES words behind K's.
        const int row = stream * (BLOCK_TOKENS / STREAMS) + token;
        const device uint* tile = tiles + (at + n) * stride;
        const device uint* k_codes = tile + row * Layout::K_WORDS + KeyCodes::words_at(octet);
        const device uint* v_codes = tile + Layout::V_CODES + row * Layout::V_WORDS + ValueCodes::words_at(octet);
        const device half* scales = (const device half*)(tile + Layout::K_SCALES);
        scales += row * Layout::GROUPS + KeyCodes::scales_at(octet);
        const float mean = simd_shuffle(means, ushort(n % TOKENS * LANES + n / TOKENS * ROWS + lane % ROWS));
        for (int from = 0; from < BLOCK_TOKENS / STREAMS; from += STEPS * TOKENS) {
          KeyCodes k[STEPS];
          ValueCodes v[STEPS];
          UNROLL
          for (int t = 0; t < STEPS; t++) {
            const device half* t_scales = scales + t * TOKENS * Layout::GROUPS;
            k[t].load(k_codes + t * TOKENS * Layout::K_WORDS, t_scales, octet);
            t_scales += 2 * (Layout::V_SCALES - Layout::K_SCALES);
            v[t].load(v_codes + t * TOKENS * Layout::V_WORDS, t_scales, octet);
          }
          k_codes += STEPS * TOKENS * Layout::K_WORDS;
          v_codes += STEPS * TOKENS * Layout::V_WORDS;
          scales += STEPS * TOKENS * Layout::GROUPS;
          float values[LANES];
          UNROLL
          for (int t = 0; t < STEPS; t++) {
            dot(k[t], q, values + t * ROWS);
          }
          accumulate(reduce(values) + mean, v);
        }
      }
    }
  }

  // keys, values: (tokens, D), of which [first, last) are this threadgroup's.
  void dense(const device C* keys, const device C* values, int first, int last) thread {
    for (int from = first + stream * STEPS * TOKENS; from < last; from += STREAMS * STEPS * TOKENS) {
      Dense k[STEPS], v[STEPS];
      float scores[LANES];
      UNROLL
      for (int t = 0; t < STEPS; t++) {
        const int at_token = from + t * TOKENS + token;
        k[t].load(keys + size_t(at_token) * D, at_token < last, octet);
        v[t].load(values + size_t(at_token) * D, at_token < last, octet);
      }
      UNROLL
      for (int t = 0; t < STEPS; t++) {
        dot(k[t], q, scores + t * ROWS);
      }
      const float score = reduce(scores);
      const int mine = from + lane % LANES / ROWS * TOKENS + token;
      accumulate(mine >= low && mine < high ? score : -INFINITY, v);
    }
  }

  static int stat(int row, int stream) { return stream * ROWS + row; }

  // Merges the streams in `out` (ROWS x D, over the queries). `stats`: m and l of every row and stream.
  void merge(threadgroup float* out, threadgroup float* stats) thread {
    UNROLL
    for (int n = ROWS; n < 32; n *= 2) {
      l += simd_shuffle_xor(l, ushort(n));
    }
    if (lane < ROWS) {
      stats[stat(lane, stream)] = m;
      stats[STATS + stat(lane, stream)] = l;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top = -INFINITY;
    UNROLL
    for (int n = 0; n < STREAMS; n++) {
      top = max(top, stats[stat(lane % ROWS, n)]);
    }
    const float shrink = m == -INFINITY ? 0.0f : fast::exp2(m - top);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float x = simd_shuffle(shrink, ushort(r));
      UNROLL
      for (int i = 0; i < 4 * N; i++) {
        UNROLL
        for (int n = LANES; n < 32; n *= 2) {
          o[r][i].x += simd_shuffle_xor(o[r][i].x, ushort(n));
          o[r][i].y += simd_shuffle_xor(o[r][i].y, ushort(n));
        }
        o[r][i] *= x;
      }
    }
    for (int n = 0; n < STREAMS; n++) {
      if (n == stream && token == 0) {
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          UNROLL
          for (int i = 0; i < 4 * N; i++) {
            const int channel = 8 * (octet + i / 4) + i % 4;
            threadgroup float* x = out + r * D + channel;
            if (channel < D) {
              x[0] = n == 0 ? o[r][i].x : x[0] + o[r][i].x;
              x[4] = n == 0 ? o[r][i].y : x[4] + o[r][i].y;
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
};
