// Causal attention of many queries over dense float32 keys and values, whose scores never leave a tile.
//
// An item is a tile of one head's queries; it passes over the keys it sees, a tile at a time, with a running
// max and sum. Scores and softmax put queries in the lanes, so that neither needs a sum across lanes; values
// put channels there. All arithmetic is float32.
//
// A query's sums run over its own keys in an order that neither the tile it stands in nor its lane changes:
// however the queries are cut into tiles, calls and threads, the result is the same to the bit.
#pragma once
#include "attention.h"

namespace longleaf {
namespace {

constexpr int kTileQueries = 64, kTileKeys = 128;
constexpr int kChains = 4;  // running maxima and sums side by side, to hide their latency
// Rows of a panel two vectors wide, by what the register file holds.
#if LANES == 16 || defined(__aarch64__)
constexpr int kPanelRows = 8;
#elif LANES == 8
constexpr int kPanelRows = 6;
#else
constexpr int kPanelRows = 4;
#endif

// Rows r of Σ_i a[r][i] b[i], b's columns in the lanes.
struct Product {
  const float* a;
  int64_t a_row, a_step;  // from one r, one i, to the next
  const float* b;
  int64_t b_step;
  int depth;
};

template <int ROWS, int VECS, class Put>
INLINE void panel(const Product& p, int row, int column, Put put) {
  vf acc[ROWS][VECS] = {};
  const float *a = p.a + row * p.a_row, *b = p.b + column;
  for (int i = 0; i < p.depth; ++i, a += p.a_step, b += p.b_step) {
    vf x[VECS];
    for (int v = 0; v < VECS; ++v) x[v] = load(b + v * W);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECS; ++v) acc[r][v] += x[v] * a[r * p.a_row];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) put(row + r, column + v * W, acc[r][v]);
}

template <int ROWS, int VECS, class Put>
INLINE void panels(const Product& p, int row, int rows, int column, Put put) {
  for (; row + ROWS <= rows; row += ROWS) panel<ROWS, VECS>(p, row, column, put);
  if constexpr (ROWS > 1)
    if (row < rows) panels<ROWS / 2, VECS>(p, row, rows, column, put);
}

// `columns` is a multiple of W.
template <class Put>
INLINE void product(const Product& p, int rows, int columns, Put put) {
  int column = 0;
  for (; column + 2 * W <= columns; column += 2 * W) panels<kPanelRows, 2>(p, 0, rows, column, put);
  if (column < columns) panels<kPanelRows, 1>(p, 0, rows, column, put);
}

struct PrefillScratch {
  float *q;                        // [channel][query], scaled; 0 in the padding
  float *scores;                   // [key][query]
  float *out;                      // [query][channel]
  float *max, *sum, *correction;   // [query]
  int64_t size = 0;

  PrefillScratch(int head_dim, float* memory) {
    const auto take = [this, memory](int64_t n) {
      float* p = memory ? memory + size : nullptr;
      size += (n + 15) / 16 * 16;
      return p;
    };
    q = take((int64_t)head_dim * kTileQueries);
    scores = take(kTileKeys * kTileQueries);
    out = take((int64_t)head_dim * kTileQueries);
    max = take(kTileQueries);
    sum = take(kTileQueries);
    correction = take(kTileQueries);
  }
};

// Scores to weights exp(score − max), in place, with the running max and sum moved on. Query i of the tile
// sees the first `visible` + i of these keys. What it doesn't see gets weight 0.
static void soften_columns(PrefillScratch& s, int keys, int columns, int visible) {
  const int padded = (keys + kChains - 1) / kChains * kChains;
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  for (int c = 0; c < columns; c += W) {
    float* from = s.scores + c;
    const vi seen = lane + (visible + c);
    for (int t = visible + c < 0 ? 0 : visible + c; t < padded; ++t) {
      float* x = from + t * kTileQueries;
      store(x, t < keys ? (seen > t ? load(x) : splat(-kInfinity)) : splat(-kInfinity));
    }
    const vf before = load(s.max + c);
    vf top[kChains], total[kChains] = {};
    for (int i = 0; i < kChains; ++i) top[i] = before;
    for (int t = 0; t < padded; t += kChains)
      for (int i = 0; i < kChains; ++i) top[i] = vmax(load(from + (t + i) * kTileQueries), top[i]);
    const vf after = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
    // A query all of whose scores are −∞: every weight is 0.
    const vf shift = after == -kInfinity ? vf{} : after;
    for (int t = 0; t < padded; t += kChains)
      for (int i = 0; i < kChains; ++i) {
        float* x = from + (t + i) * kTileQueries;
        const vf weight = exp_negative(load(x) - shift);
        store(x, weight);
        total[i] += weight;
      }
    const vf correction = exp_negative(before - shift);
    store(s.max + c, after);
    store(s.sum + c, load(s.sum + c) * correction + ((total[0] + total[1]) + (total[2] + total[3])));
    store(s.correction + c, correction);
  }
}

// Items head by head, so that those at work at one time read the same keys; the longest of a head first.
static void prefill(const Prefill& a, int item, float* scratch) {
  PrefillScratch s(a.head_dim, scratch);
  const int tiles = (a.num_queries + kTileQueries - 1) / kTileQueries, dim = a.head_dim;
  const int head = item / tiles, first = (tiles - 1 - item % tiles) * kTileQueries;
  const int rows = a.num_queries - first < kTileQueries ? a.num_queries - first : kTileQueries;
  const int columns = (rows + W - 1) / W * W, kv_head = head / (a.num_q_heads / a.num_kv_heads);
  const int own = a.num_tokens - a.num_queries + first;  // position of the tile's first query

  for (int r = 0; r < columns; ++r) {
    const float* from = r < rows ? (const float*)at_element(a.q, 0, head, first + r) : nullptr;
    for (int c = 0; c < dim; ++c) s.q[c * kTileQueries + r] = from ? from[c] * a.scale : 0;
  }
  memset(s.out, 0, sizeof(float) * rows * dim);
  for (int c = 0; c < columns; c += W) {
    store(s.max + c, splat(-kInfinity));
    store(s.sum + c, vf{});
  }
  for (int start = 0; start < own + rows; start += kTileKeys) {
    const int keys = own + rows - start < kTileKeys ? own + rows - start : kTileKeys;
    product({(const float*)at_element(a.k, 0, kv_head, start), a.k.stride[2], 1, s.q, kTileQueries, dim}, keys,
            columns, [&s](int t, int c, vf x) { store(s.scores + t * kTileQueries + c, x); });
    soften_columns(s, keys, columns, own + 1 - start);
    // Each tile is summed by itself: sums of a few hundred lose less than one of all tokens.
    product({s.scores, 1, kTileQueries, (const float*)at_element(a.v, 0, kv_head, start), a.v.stride[2], keys},
            rows, dim, [&s, dim](int r, int c, vf x) {
              float* to = s.out + r * dim + c;
              store(to, load(to) * s.correction[r] + x);
            });
  }
  for (int r = 0; r < rows; ++r) {
    float* to = (float*)at_element(a.out, 0, head, first + r);
    for (int c = 0; c < dim; c += W) store(to + c, load(s.out + r * dim + c) / s.sum[r]);
  }
}

static int prefill_items(const Prefill& a) {
  return a.num_q_heads * ((a.num_queries + kTileQueries - 1) / kTileQueries);
}

static int64_t prefill_scratch(const Prefill& a) { return PrefillScratch(a.head_dim, nullptr).size; }

}  // namespace
}  // namespace longleaf
