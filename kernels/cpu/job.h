// What the launcher hands over and what one instruction set offers. Plain structures, as ctypes writes them.
#pragma once
#include <stdint.h>

namespace longleaf {

constexpr int kBlockTokens = 128;

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// An array whose last axis is contiguous; strides count elements of the three axes before it (0 if missing).
struct Tensor {
  void* data;
  int64_t stride[3];
  int32_t dtype;
};

// How the channels of a tile are coded: midrise codes of the rotated basis, or affine ones (kernels/formats.py).
struct Coding {
  int32_t k_bits, v_bits;           // 4 or 8
  int32_t rotated;                  // 0: affine
};

struct Attention {
  Tensor q;                         // [batch][q head][query]
  Tensor sinks_k, sinks_v;          // [KV head][token]
  Tensor tail_k, tail_v;            // [batch][KV head][token]
  Tensor out;                       // [batch][q head][query]
  const uint32_t* tiles;            // [block][KV head], `tile_words` each
  const int32_t* tail_lengths;      // [batch], or null: all of the tail counts
  const float* sink_logits;         // [q head], or null
  const float* rotation;            // R, row-major
  const float* rotation_transposed; // its transpose
  int32_t batch, num_q_heads, num_kv_heads, num_queries, head_dim;
  int32_t num_sinks, num_blocks, num_tail;
  int32_t window;                   // 0: no limit
  Coding coding;
  float scale;
};

// Causal attention over dense tokens, all float32: query i sees keys 0 .. num_tokens - num_queries + i.
struct Prefill {
  Tensor q, out;                    // [1][q head][query]
  Tensor k, v;                      // [1][KV head][token]
  int32_t num_q_heads, num_kv_heads, num_queries, num_tokens;
  int32_t head_dim;                 // a multiple of 16
  float scale;
};

// Keys and values of whole blocks against tiles, in either direction.
struct Recode {
  Tensor k, v;                      // [KV head][token]
  uint32_t* tiles;
  const float* rotation;
  const float* rotation_transposed;
  int32_t num_kv_heads, num_blocks, head_dim;
  Coding coding;
};

// The codes of a tile's keys or of its values, in 32-bit words.
struct Codes {
  int bits, row_words, group_words, words;  // of a code, of a token, of its group, of all
};

// Where the parts of a tile stand, in 32-bit words (kernels/formats.py).
struct Layout {
  int head_dim, num_groups, group_size, scales_words, mean_words;
  bool rotated;
  Codes k, v;
  Layout(int dim, const Coding& coding)
      : head_dim(dim),
        num_groups((dim + 63) / 64),
        group_size(dim / num_groups),
        scales_words(kBlockTokens * num_groups / 2),
        mean_words(dim / 2),
        rotated(coding.rotated),
        k(codes(coding.k_bits)),
        v(codes(coding.v_bits)) {}
  int k_words() const { return k.words + scales_words + (rotated ? mean_words : scales_words); }
  int v_words() const { return v.words + (rotated ? 1 : 2) * scales_words; }
  int tile_words() const { return k_words() + v_words(); }

 private:
  Codes codes(int bits) const {
    return {bits, head_dim * bits / 32, group_size * bits / 32, kBlockTokens * head_dim * bits / 32};
  }
};

// How one attention call is cut. A part is a range of blocks, the sinks, or a range of a row's tail; each
// leaves a partial (out, max, sum) per row, and whoever finishes a KV head's last part combines them.
struct Plan {
  int rows;                         // query rows of one KV head: batch * group * num_queries
  int group;                        // query heads per KV head
  int num_splits;                   // parts over the blocks, whose partials are in the codes' basis
  int sink_parts;                   // 0 or 1
  int tail_parts, tail_part_tokens; // parts of one row's tail
  int parts;                        // partials per row
  int items;                        // parts to be done, over all KV heads
  float *out, *max, *sum;           // [KV head][part][row], out with head_dim values each
  int32_t* pending;                 // [KV head] parts still to do
};

// One instruction set's code. Scratch is private to a thread; sizes are in floats.
struct InstructionSet {
  const char* name;
  int64_t (*attend_scratch)(const Attention&, const Plan&);
  void (*attend)(const Attention&, const Plan&, int item, float* scratch);
  int64_t (*prefill_scratch)(const Prefill&);
  int (*prefill_items)(const Prefill&);
  void (*prefill)(const Prefill&, int item, float* scratch);
  int64_t (*recode_scratch)(int head_dim);
  void (*encode)(const Recode&, int tile, float* scratch);
  void (*decode)(const Recode&, int tile, float* scratch);
};

extern const InstructionSet baseline;
#if defined(__x86_64__)
extern const InstructionSet avx2;
extern const InstructionSet avx512;
#endif

}  // namespace longleaf
