// Decode attention over one layer's cache: every part of it, and the combine.
//
// A KV head's query rows (batch × group × queries) share each K and V that is read. Scores put tokens in
// the lanes: 4x4 transposes bring word w of LANES tokens into one vector. Values put channels in the lanes.
// Codes become floats centred on their midrise (simd.h), since sums of 0..15 would lose three bits to their mean.
// Affine codes are the same plus an offset per token and group, bias + midrise · scale: it adds to a score the
// sum of the query's channels times itself, and to every channel of a group one number.
// A group narrower than 64 channels is padded: the words after it belong to the same tile and meet zeros.
// All arithmetic is float32.
#pragma once
#include "job.h"
#include "simd.h"

namespace longleaf {
namespace {

constexpr int kGroup = 64;                // channels of a padded group
template <int BITS>
constexpr int kWords = kGroup * BITS / 32;  // words of one
constexpr int kVectors = kGroup / W;      // vectors of one
constexpr int kMaxRows = 8;               // rows that one pass over a tile's codes serves
constexpr float kInfinity = __builtin_inff();

// Value vector v of a group: of bytes channel v·W + i in lane i; of nibbles, (v·W + i) / 8 of word (v·W + i) % 8.
template <int BITS>
INLINE vf value_vector(const uint32_t* words, int v) {
  if constexpr (BITS == 8) {
    vb x;
    memcpy(&x, (const char*)words + v * W, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, vi), vf) - kMidrise<8>;
  } else {
#if LANES == 16
    uint32_t twice[16];
    memcpy(twice, words, 32);
    memcpy(twice + 8, words, 32);
    vu x, shift;
    memcpy(&x, twice, sizeof x);
    for (int i = 0; i < W; ++i) shift[i] = 4 * (2 * v + i / 8);
    return look_up(x >> shift);
#else
    vu x;
    memcpy(&x, words + v * W % kWords<4>, sizeof x);
    return centred<4>(x, v * W / kWords<4>);
#endif
  }
}

// Channel of a group, and its place, of number i of the group's value vectors.
INLINE int value_channel(int bits, int i) { return bits == 8 ? i : i % kWords<4> * 8 + i / kWords<4>; }
INLINE float value_place(int bits, int i) { return bits == 8 ? 1 : Places<4>::at[i / kWords<4>]; }

// Scales of a tile, [token][group] float16, to [group][token] float32.
template <int GROUPS>
INLINE void read_scales_of(const uint32_t* words, float* out) {
  float by_token[kBlockTokens * GROUPS];
  widen(by_token, words, kFloat16, kBlockTokens * GROUPS);
  for (int g = 0; g < GROUPS; ++g)
    for (int t = 0; t < kBlockTokens; ++t) out[g * kBlockTokens + t] = by_token[t * GROUPS + g];
}

static void read_scales(const uint32_t* words, const Layout& at, float* out) {
  switch (at.num_groups) {
    case 1: return read_scales_of<1>(words, out);
    case 2:  // a word is a token's pair
      for (int t = 0; t < kBlockTokens; t += W) {
        vu pair;
        memcpy(&pair, words + t, sizeof pair);
        store(out + t, from_half(pair & 0xffff));
        store(out + kBlockTokens + t, from_half(pair >> 16));
      }
      return;
    case 3: return read_scales_of<3>(words, out);
    case 4: return read_scales_of<4>(words, out);
    case 5: return read_scales_of<5>(words, out);
    case 6: return read_scales_of<6>(words, out);
    case 7: return read_scales_of<7>(words, out);
    default: return read_scales_of<8>(words, out);
  }
}

struct Queries {
  float *plain;    // [row][head_dim], scaled, not rotated: for dense tokens and the block's mean
  float *coded;    // [row][group][64], rotated if the codes are, divided by their place, 0 in the padding
  float *sums;     // [row][group], of the channels of `plain`
};

// Adds to scores[ROWS][128] what one tile's codes of keys give.
template <int ROWS, int BITS>
__attribute__((noinline)) static void tile_scores(const uint32_t* codes, const float* scales, const Layout& at,
                        const float* coded, const char* ahead, float* scores) {
  constexpr int T = ROWS == 1 && W < 16 ? 4 : ROWS <= 4 ? 2 : 1;  // token vectors at once, to hide FMA latency
  const int groups = at.num_groups, row_words = at.k.row_words;
  for (int i = at.k.words * 4; i < at.k_words() * 4; i += 64) __builtin_prefetch(ahead + i, 0, 2);
  for (int t = 0; t < kBlockTokens; t += T * W) {
    for (int i = 0; i < T * W * row_words * 4; i += 64)
      __builtin_prefetch(ahead + (int64_t)t * row_words * 4 + i, 0, 2);
    vf total[T][ROWS];
    for (int r = 0; r < ROWS; ++r)
      for (int u = 0; u < T; ++u) total[u][r] = load(scores + r * kBlockTokens + t + u * W);
    for (int g = 0; g < groups; ++g) {
      vu words[kWords<BITS>][T];
      for (int u = 0; u < T; ++u) {
        const uint32_t* from = codes + (t + u * W) * row_words + g * at.k.group_words;
        vu quad[4];
        for (int first = 0; first < kWords<BITS>; first += 4) {
          transpose_quad(from + first, row_words, quad);
          for (int w = 0; w < 4; ++w) words[first + w][u] = quad[w];
        }
      }
      vf acc[T][ROWS] = {};
      const float* q = coded + g * kGroup;
#pragma clang loop unroll(disable)
      for (int w = 0; w < kWords<BITS>; ++w, q += kCodesPerWord<BITS>) {
        vu x[T];
        for (int u = 0; u < T; ++u) x[u] = words[w][u];
#pragma clang loop unroll(full)
        for (int j = 0; j < kCodesPerWord<BITS>; ++j) {
          vf c[T];
          for (int u = 0; u < T; ++u) c[u] = centred<BITS>(x[u], j);
          for (int r = 0; r < ROWS; ++r) {
            const float qj = q[r * groups * kGroup + j];
            for (int u = 0; u < T; ++u) acc[u][r] += c[u] * qj;
          }
        }
      }
      for (int u = 0; u < T; ++u) {
        const vf s = load(scales + g * kBlockTokens + t + u * W);
        for (int r = 0; r < ROWS; ++r) total[u][r] += acc[u][r] * s;
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int u = 0; u < T; ++u) store(scores + r * kBlockTokens + t + u * W, total[u][r]);
  }
}

// out[row][group][64] = correction · out + Σ_t weight · value, for ROWS rows over one tile's values.
// `weights` [row][group][128] have the scales in them.
template <int ROWS, int BITS, int FIRST, int VECS>
INLINE void weigh_vectors(const uint32_t* codes, const Layout& at, int g, const float* weights,
                          const float* correction, float* out) {
  const int groups = at.num_groups;
  vf acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v)
      acc[r][v] = load(out + (r * groups + g) * kGroup + (FIRST + v) * W) * correction[r];
  const uint32_t* from = codes + g * at.v.group_words;
  const float* w = weights + g * kBlockTokens;
#pragma clang loop unroll_count(2)
  for (int t = 0; t < kBlockTokens; ++t, from += at.v.row_words) {
    vf c[VECS];
    for (int v = 0; v < VECS; ++v) c[v] = value_vector<BITS>(from, FIRST + v);
    for (int r = 0; r < ROWS; ++r) {
      const float wr = w[r * groups * kBlockTokens + t];
      for (int v = 0; v < VECS; ++v) acc[r][v] += c[v] * wr;
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(out + (r * groups + g) * kGroup + (FIRST + v) * W, acc[r][v]);
}

template <int ROWS, int BITS, int FIRST, int VECS>
INLINE void weigh_group(const uint32_t* codes, const Layout& at, int g, const float* weights,
                        const float* correction, float* out) {
  if constexpr (FIRST < kVectors) {
    weigh_vectors<ROWS, BITS, FIRST, VECS>(codes, at, g, weights, correction, out);
    weigh_group<ROWS, BITS, FIRST + VECS, VECS>(codes, at, g, weights, correction, out);
  }
}

template <int ROWS, int BITS>
__attribute__((noinline)) static void tile_values(const uint32_t* codes, const Layout& at, const float* weights,
                        const float* correction, const char* ahead, float* out) {
  // Vectors at once, by what the register file holds: 32 vectors for 16 lanes, 16 for the others.
  constexpr int kAtOnce = W == 16 ? (ROWS <= 6 ? 4 : 2) : ROWS == 1 ? 8 : ROWS == 2 ? 4 : ROWS <= 4 ? 2 : 1;
  for (int i = 0; i < at.v_words() * 4; i += 64) __builtin_prefetch(ahead + i, 0, 2);
  for (int g = 0; g < at.num_groups; ++g)
    weigh_group<ROWS, BITS, 0, kAtOnce>(codes, at, g, weights, correction, out);
}

// Scores of ROWS rows to weights exp(score − max), in place, with the running max and sum moved on.
// `correction` is what earlier sums are to be multiplied by.
static void soften(float* scores, int rows, int n, float* max, float* sum_, float* correction) {
  for (int r = 0; r < rows; ++r) {
    float* s = scores + r * kBlockTokens;
    vf top = splat(max[r]);
    for (int t = 0; t < n; t += W) top = vmax(load(s + t), top);
    const float m = max_of(top);
    // A row that has seen nothing yet, here neither: every weight is 0.
    const float shift = m == -kInfinity ? 0 : m;
    vf total = {};
    for (int t = 0; t < n; t += W) {
      const vf p = exp_negative(load(s + t) - shift);
      store(s + t, p);
      total += p;
    }
    correction[r] = exp_negative(splat(max[r] - shift))[0];
    sum_[r] = sum_[r] * correction[r] + sum(total);
    max[r] = m;
  }
}

struct Scratch {
  Queries q;
  float *acc;         // [row][group][64]
  float *lifts;       // [row][group], what affine offsets add to every channel
  float *max, *sum;   // [row]
  float *scores;      // [kMaxRows][128]
  float *weights;     // [kMaxRows][group][128]
  float *k_scales, *v_scales, *k_offsets, *v_offsets;  // [group][128]
  float *mean;
  float *k, *v;       // [128][head_dim], dense tokens
  float *rows_a, *rows_b;  // [row][head_dim]
  int64_t size = 0;

  Scratch(const Attention& a, const Plan& plan, float* memory) {
    const Layout layout(a.head_dim, a.coding);
    const auto take = [this, memory](int64_t n) {
      float* p = memory ? memory + size : nullptr;
      size += (n + 15) / 16 * 16;
      return p;
    };
    const int64_t rows = plan.rows, dim = a.head_dim, groups = layout.num_groups;
    q.plain = take(rows * dim);
    q.coded = take(rows * groups * kGroup);
    q.sums = take(rows * groups);
    acc = take(rows * groups * kGroup);
    lifts = take(rows * groups);
    max = take(rows);
    sum = take(rows);
    scores = take(kMaxRows * kBlockTokens);
    weights = take(kMaxRows * groups * kBlockTokens);
    k_scales = take(groups * kBlockTokens);
    v_scales = take(groups * kBlockTokens);
    k_offsets = take(groups * kBlockTokens);
    v_offsets = take(groups * kBlockTokens);
    mean = take(dim);
    k = take(kBlockTokens * dim);
    v = take(kBlockTokens * dim);
    rows_a = take(rows * dim);
    rows_b = take(rows * dim);
  }
};

// Row r of KV head h is query s of query head h·group + g of batch b, r = (b·group + g)·queries + s.
struct Row { int batch, head, query; };
INLINE Row row_at(const Attention& a, const Plan& plan, int h, int r) {
  const int s = r % a.num_queries, g = r / a.num_queries % plan.group, b = r / a.num_queries / plan.group;
  return {b, h * plan.group + g, s};
}

INLINE char* at_element(const Tensor& x, int64_t i, int64_t j, int64_t k) {
  const int64_t element = i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
  return (char*)x.data + element * (x.dtype == kFloat32 ? 4 : 2);
}

static void read_queries(const Attention& a, const Plan& plan, int h, int first, int count, Scratch& s) {
  for (int r = first; r < first + count; ++r) {
    const Row row = row_at(a, plan, h, r);
    float* q = s.q.plain + (int64_t)r * a.head_dim;
    widen(q, at_element(a.q, row.batch, row.head, row.query), a.q.dtype, a.head_dim);
    for (int i = 0; i < a.head_dim; i += W) store(q + i, load(q + i) * a.scale);
  }
}

static void code_queries(const Attention& a, const Plan& plan, const Layout& at, Scratch& s) {
  if (at.rotated) multiply(s.q.plain, a.rotation, s.rows_a, plan.rows, a.head_dim, a.head_dim);
  const float* rows = at.rotated ? s.rows_a : s.q.plain;
  const float* places = at.k.bits == 8 ? Places<8>::at : Places<4>::at;
  const int per_word = 32 / at.k.bits;
  for (int64_t r = 0; r < plan.rows; ++r)
    for (int g = 0; g < at.num_groups; ++g) {
      const float* from = rows + r * a.head_dim + g * at.group_size;
      float* to = s.q.coded + (r * at.num_groups + g) * kGroup;
      float total = 0;
      for (int c = 0; c < at.group_size; ++c) {
        to[c] = from[c] / places[c % per_word];
        total += from[c];
      }
      for (int c = at.group_size; c < kGroup; ++c) to[c] = 0;
      s.q.sums[r * at.num_groups + g] = total;
    }
}

// Scores of ROWS rows before the codes: q · mean of every token, or what the offsets of the keys give.
template <int ROWS>
static void begin_scores(const Layout& at, int first, Scratch& s) {
  for (int r = 0; r < ROWS; ++r) {
    float* scores = s.scores + r * kBlockTokens;
    vf base = {};
    if (at.rotated) {
      const float* q = s.q.plain + (int64_t)(first + r) * at.head_dim;
      vf dot = {};
      for (int c = 0; c < at.head_dim; c += W) dot += load(q + c) * load(s.mean + c);
      base = splat(sum(dot));
    }
    for (int t = 0; t < kBlockTokens; t += W) store(scores + t, base);
    for (int g = 0; g < at.num_groups && !at.rotated; ++g)
      for (int t = 0; t < kBlockTokens; t += W)
        store(scores + t, load(scores + t) + load(s.k_offsets + g * kBlockTokens + t) *
                                                 s.q.sums[(int64_t)(first + r) * at.num_groups + g]);
  }
}

template <int ROWS>
static void attend_rows(const uint32_t* tile, const uint32_t* next, const Layout& at, int first, Scratch& s) {
  const int groups = at.num_groups;
  const int64_t from = (int64_t)first * groups;
  float correction[ROWS];
  begin_scores<ROWS>(at, first, s);
  const auto scores = at.k.bits == 8 ? tile_scores<ROWS, 8> : tile_scores<ROWS, 4>;
  scores(tile, s.k_scales, at, s.q.coded + from * kGroup, (const char*)next, s.scores);
  soften(s.scores, ROWS, kBlockTokens, s.max + first, s.sum + first, correction);
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < groups; ++g) {
      const float* weights = s.scores + r * kBlockTokens;
      float* w = s.weights + (r * groups + g) * kBlockTokens;
      for (int t = 0; t < kBlockTokens; t += W)
        store(w + t, load(weights + t) * load(s.v_scales + g * kBlockTokens + t));
      if (at.rotated) continue;
      vf lift = {};
      for (int t = 0; t < kBlockTokens; t += W)
        lift += load(weights + t) * load(s.v_offsets + g * kBlockTokens + t);
      s.lifts[from + r * groups + g] = s.lifts[from + r * groups + g] * correction[r] + sum(lift);
    }
  const auto values = at.v.bits == 8 ? tile_values<ROWS, 8> : tile_values<ROWS, 4>;
  values(tile + at.k_words(), at, s.weights, correction, (const char*)(next + at.k_words()), s.acc + from * kGroup);
}

// Scales of keys or of values, and of affine ones the offsets: biases + midrise · scales.
static void read_coding(const uint32_t* words, const Layout& at, const Codes& codes, float* scales, float* offsets) {
  read_scales(words + codes.words, at, scales);
  if (at.rotated) return;
  read_scales(words + codes.words + at.scales_words, at, offsets);
  for (int i = 0; i < at.num_groups * kBlockTokens; i += W)
    store(offsets + i, load(offsets + i) + load(scales + i) * kMidrise<4>);
}

static void clear_running(Scratch& s, int first, int count, float* out, int64_t width) {
  for (int r = first; r < first + count; ++r) {
    s.max[r] = -kInfinity;
    s.sum[r] = 0;
  }
  memset(out + first * width, 0, sizeof(float) * count * width);
}

// A range of blocks, for all rows of a KV head. Leaves the partial in the codes' basis.
static void attend_blocks(const Attention& a, const Plan& plan, int h, int part, Scratch& s) {
  const Layout at(a.head_dim, a.coding);
  const int first = (int64_t)a.num_blocks * part / plan.num_splits;
  const int last = (int64_t)a.num_blocks * (part + 1) / plan.num_splits;
  const int groups = at.num_groups;
  read_queries(a, plan, h, 0, plan.rows, s);
  code_queries(a, plan, at, s);
  clear_running(s, 0, plan.rows, s.acc, groups * kGroup);
  memset(s.lifts, 0, sizeof(float) * plan.rows * groups);
  const int passes = (plan.rows + kMaxRows - 1) / kMaxRows, step = (plan.rows + passes - 1) / passes;
  for (int block = first; block < last; ++block) {
    const uint32_t* tile = a.tiles + ((int64_t)block * a.num_kv_heads + h) * at.tile_words();
    const uint32_t* next = block + 1 < last ? tile + (int64_t)a.num_kv_heads * at.tile_words() : tile;
    read_coding(tile, at, at.k, s.k_scales, s.k_offsets);
    if (at.rotated) widen(s.mean, tile + at.k.words + at.scales_words, kFloat16, a.head_dim);
    read_coding(tile + at.k_words(), at, at.v, s.v_scales, s.v_offsets);
    for (int r = 0; r < plan.rows; r += step) switch (plan.rows - r < step ? plan.rows - r : step) {
      case 1: attend_rows<1>(tile, next, at, r, s); break;
      case 2: attend_rows<2>(tile, next, at, r, s); break;
      case 3: attend_rows<3>(tile, next, at, r, s); break;
      case 4: attend_rows<4>(tile, next, at, r, s); break;
      case 5: attend_rows<5>(tile, next, at, r, s); break;
      case 6: attend_rows<6>(tile, next, at, r, s); break;
      case 7: attend_rows<7>(tile, next, at, r, s); break;
      default: attend_rows<8>(tile, next, at, r, s);
    }
  }
  const int64_t to = ((int64_t)h * plan.parts + part) * plan.rows;
  for (int64_t r = 0; r < plan.rows; ++r) {
    plan.max[to + r] = s.max[r];
    plan.sum[to + r] = s.sum[r];
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < kGroup; ++i) {
        const int channel = value_channel(at.v.bits, i);
        if (channel < at.group_size)
          plan.out[(to + r) * a.head_dim + g * at.group_size + channel] =
              s.acc[(r * groups + g) * kGroup + i] / value_place(at.v.bits, i) + s.lifts[r * groups + g];
      }
  }
}

// Dense tokens first..last-1 for rows first_row.. of a KV head; row i sees those in [from[i], to[i]).
static void attend_dense(const Attention& a, const Plan& plan, int h, int part, int first_row, int num_rows,
                         const Tensor& k, const Tensor& v, int batch, int first, int last, bool causal,
                         int length, Scratch& s) {
  const int dim = a.head_dim;
  read_queries(a, plan, h, first_row, num_rows, s);
  clear_running(s, first_row, num_rows, s.rows_b, dim);
  for (int start = first; start < last; start += kBlockTokens) {
    const int count = last - start < kBlockTokens ? last - start : kBlockTokens;
    for (int t = 0; t < count; ++t) {
      widen(s.k + t * dim, at_element(k, batch, h, start + t), k.dtype, dim);
      widen(s.v + t * dim, at_element(v, batch, h, start + t), v.dtype, dim);
    }
    const int padded = (count + W - 1) / W * W;
    for (int r = first_row; r < first_row + num_rows; ++r) {
      const float* q = s.q.plain + (int64_t)r * dim;
      const int own = length - a.num_queries + r % a.num_queries;  // the query's position in the tail
      float correction;
      for (int t = 0; t < padded; ++t) {
        const int position = start + t;
        const bool visible =
            t < count && (!causal || (position <= own && (!a.window || position > own - a.window)));
        vf dot = {};
        if (visible)
          for (int c = 0; c < dim; c += W) dot += load(q + c) * load(s.k + t * dim + c);
        s.scores[t] = visible ? sum(dot) : -kInfinity;
      }
      soften(s.scores, 1, padded, s.max + r, s.sum + r, &correction);
      float* out = s.rows_b + (int64_t)r * dim;
      for (int c = 0; c < dim; c += W) {
        vf acc = load(out + c) * correction;
        for (int t = 0; t < count; ++t) acc += load(s.v + t * dim + c) * s.scores[t];
        store(out + c, acc);
      }
    }
  }
  const int64_t to = ((int64_t)h * plan.parts + part) * plan.rows;
  for (int64_t r = first_row; r < first_row + num_rows; ++r) {
    plan.max[to + r] = s.max[r];
    plan.sum[to + r] = s.sum[r];
    memcpy(plan.out + (to + r) * dim, s.rows_b + r * dim, sizeof(float) * dim);
  }
}

// A range of one batch row's tail.
static void attend_tail(const Attention& a, const Plan& plan, int h, int batch, int part, Scratch& s) {
  int length = a.tail_lengths ? a.tail_lengths[batch] : a.num_tail;
  length = length < 0 ? 0 : length > a.num_tail ? a.num_tail : length;
  int first = part * plan.tail_part_tokens;
  int last = first + plan.tail_part_tokens;
  const int oldest = a.window ? length - a.num_queries - a.window + 1 : 0;  // that any query sees
  first = first < oldest ? oldest : first;
  last = last > length ? length : last;
  const int rows = plan.group * a.num_queries;
  attend_dense(a, plan, h, plan.num_splits + plan.sink_parts + part, batch * rows, rows, a.tail_k, a.tail_v,
               batch, first, last, true, length, s);
}

static void combine(const Attention& a, const Plan& plan, int h, Scratch& s) {
  const int dim = a.head_dim, num_rotated = a.coding.rotated ? plan.num_splits : 0;
  for (int64_t r = 0; r < plan.rows; ++r) {
    const Row row = row_at(a, plan, h, r);
    const int64_t base = (int64_t)h * plan.parts * plan.rows + r;
    float top = a.sink_logits ? a.sink_logits[row.head] : -kInfinity;
    for (int p = 0; p < plan.parts; ++p) {
      const float m = plan.max[base + (int64_t)p * plan.rows];
      top = m > top ? m : top;
    }
    float* rotated = s.rows_a + r * dim;
    float* dense = s.q.plain + r * dim;
    memset(rotated, 0, sizeof(float) * dim);
    memset(dense, 0, sizeof(float) * dim);
    float total = a.sink_logits ? exp_negative(splat(a.sink_logits[row.head] - top))[0] : 0;
    for (int p = 0; p < plan.parts; ++p) {
      const int64_t at = base + (int64_t)p * plan.rows;
      if (plan.max[at] == -kInfinity && plan.sum[at] == 0) continue;
      const float weight = exp_negative(splat(plan.max[at] - top))[0];
      total += plan.sum[at] * weight;
      float* to = p < num_rotated ? rotated : dense;
      for (int c = 0; c < dim; c += W) store(to + c, load(to + c) + load(plan.out + at * dim + c) * weight);
    }
    const float inverse = 1 / total;
    for (int c = 0; c < dim; c += W) {
      store(rotated + c, load(rotated + c) * inverse);
      store(dense + c, load(dense + c) * inverse);
    }
  }
  if (num_rotated) multiply(s.rows_a, a.rotation_transposed, s.rows_b, plan.rows, dim, dim);
  for (int64_t r = 0; r < plan.rows; ++r) {
    const Row row = row_at(a, plan, h, r);
    float* x = s.q.plain + r * dim;
    if (num_rotated)
      for (int c = 0; c < dim; c += W) store(x + c, load(x + c) + load(s.rows_b + r * dim + c));
    narrow(at_element(a.out, row.batch, row.head, row.query), x, a.out.dtype, dim);
  }
}

// Items in order of cost: all block parts, then the sinks, then the tails.
static void attend(const Attention& a, const Plan& plan, int item, float* scratch) {
  Scratch s(a, plan, scratch);
  const int heads = a.num_kv_heads;
  const int h = item % heads;
  int part = item / heads;
  if (part < plan.num_splits) {
    attend_blocks(a, plan, h, part, s);
  } else if (part -= plan.num_splits; part < plan.sink_parts) {
    attend_dense(a, plan, h, plan.num_splits, 0, plan.rows, a.sinks_k, a.sinks_v, 0, 0, a.num_sinks, false, 0,
                 s);
  } else {
    part -= plan.sink_parts;
    attend_tail(a, plan, h, part / plan.tail_parts, part % plan.tail_parts, s);
  }
  if (__atomic_sub_fetch(&plan.pending[h], 1, __ATOMIC_ACQ_REL) == 0) combine(a, plan, h, s);
}

static int64_t attend_scratch(const Attention& a, const Plan& plan) {
  return Scratch(a, plan, nullptr).size;
}

}  // namespace
}  // namespace longleaf
