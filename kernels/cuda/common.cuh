// What every kernel of this folder shares: the device order of a tile, instructions, the rotation.
//
// A module is compiled for one head size and one format. The launcher puts these before the include:
//   LONGLEAF_D       the head size
//   LONGLEAF_K_BITS, LONGLEAF_V_BITS  of a code, 4 or 8
//   LONGLEAF_AFFINE  1: x = code * scale + bias of channels as they came; 0: (code - midrise) * scale of rotated ones
//   LONGLEAF_INNER   the power of two in H = H_outer (x) H_inner
//   LONGLEAF_SIGNS   the rotation's signs, one bit a channel, 1 meaning -1
//   LONGLEAF_OUTER   the signs of H_outer, one word a row ({0} where D is a power of two)
//
// Device order of a tile (one KV head, 128 tokens; the canonical order is kernels/formats.py): four slices
// of 32 tokens, then the mean as it was. All numbers of a slice stand where a lane of mma.m16n8k16 wants
// them; `lane` = 4g + t. A lane has a word of 4-bit codes for each 16 channels and 16 tokens, two of 8-bit codes.
//
//   | part     | bytes    | position                  | holds                                              |
//   |----------|----------|---------------------------|----------------------------------------------------|
//   | k_codes  | 4 bits D | [j 2][code_word(i, lane)] | token 16j + across, channel 16 step + along        |
//   | v_codes  | 4 bits D | [j 2][code_word(i, lane)] | token 16j + along, channel 16 step + across        |
//   | k_scales | 64 G     | [g][group][j][p]          | token 16j + g + 8p                                 |
//   | v_scales | 64 G     | [j][t][group][p][e]       | token 16j + 2t + 8p + e                            |
//   | k_biases, v_biases  | as the scales             | where AFFINE                                       |
//
// with step, across and along of a code as `place_of` says.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace longleaf {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int D = LONGLEAF_D;
constexpr int GROUPS = (D + 63) / 64;
constexpr int GROUP = D / GROUPS;  // channels of one scale
constexpr int STEPS = D / 16;      // 16-channel steps of an mma
constexpr int BLOCK = 128;         // tokens of a tile
constexpr int PER_LANE = (D + 31) / 32;

constexpr int K_BITS = LONGLEAF_K_BITS, V_BITS = LONGLEAF_V_BITS;
constexpr bool AFFINE = LONGLEAF_AFFINE;
__device__ constexpr float midrise(int bits) { return (1 << (bits - 1)) - .5f; }

constexpr int K_CODES = 0;
constexpr int V_CODES = 4 * K_BITS * D;
constexpr int K_SCALES = V_CODES + 4 * V_BITS * D;
constexpr int V_SCALES = K_SCALES + 64 * GROUPS;
constexpr int K_BIASES = V_SCALES + 64 * GROUPS;
constexpr int V_BIASES = K_BIASES + 64 * GROUPS;
constexpr int SLICE = AFFINE ? V_BIASES + 64 * GROUPS : K_BIASES;
constexpr int MEAN = 4 * SLICE;
constexpr int MEAN_BYTES = AFFINE ? 0 : 2 * D;
constexpr int TILE = MEAN + MEAN_BYTES;
constexpr int STAGE = SLICE + MEAN_BYTES;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NONE = -1e30f;  // a maximum over nothing

__constant__ u32 OUTER[] = LONGLEAF_OUTER;
constexpr int INNER = LONGLEAF_INNER;
constexpr int NUM_OUTER = D / INNER;

// Words of one lane in 16 tokens of codes. They are loaded four, then two, then one at a time.
template <int BITS> constexpr int WORDS = STEPS * BITS / 4;

template <int BITS>
__device__ constexpr int code_word(int i, int lane) {
  constexpr int QUADS = WORDS<BITS> / 4, REST = WORDS<BITS> % 4;
  if (i < 4 * QUADS) return ((i / 4) * 32 + lane) * 4 + i % 4;
  if (REST >= 2 && i < 4 * QUADS + 2) return 128 * QUADS + lane * 2 + i % 4;
  return 128 * QUADS + (REST >= 2 ? 64 : 0) + lane;
}
// Code n of a lane's word i: its row of the matrix tile, 0-15, and its place along the sum, 0-15, of step `step`.
// Four bits: byte y holds two rows, g low and g + 8 high. Eight: a byte holds one.
template <int BITS>
__device__ __forceinline__ void place_of(int i, int lane, int n, int& step, int& across, int& along) {
  const int g = lane >> 2, t = lane & 3, y = n >> 1;
  step = BITS == 4 ? i : i >> 1;
  across = g + 8 * (n & 1);
  along = 2 * t + (BITS == 4 ? 8 * (y & 1) + (y >> 1) : 8 * (i & 1) + y);
}

// The scale of a slice's token and group among its part's.
template <bool KEYS>
__device__ __forceinline__ int scale_place(int token, int group) {
  const int j = token / 16, x = token % 16;
  return KEYS ? ((x % 8 * GROUPS + group) * 2 + j) * 2 + x / 8 : (((j * 4 + x % 8 / 2) * GROUPS + group) * 2 + x / 8) * 2 + x % 2;
}

// The words of steps first..last.
template <int BITS>
__device__ __forceinline__ void load_codes(const u8* codes, int lane, int first, int last, u32 (&w)[WORDS<BITS>]) {
  constexpr int N = WORDS<BITS>, REST = N / 4 * 4;
  first *= BITS / 4;
  last *= BITS / 4;
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    if (4 * i >= first && 4 * i < last) {
      const uint4 x = *(const uint4*)(codes + 4 * code_word<BITS>(4 * i, lane));
      w[4 * i] = x.x; w[4 * i + 1] = x.y; w[4 * i + 2] = x.z; w[4 * i + 3] = x.w;
    }
  if (N % 4 >= 2 && REST < last) {
    const uint2 x = *(const uint2*)(codes + 4 * code_word<BITS>(REST, lane));
    w[REST] = x.x; w[N > REST + 1 ? REST + 1 : REST] = x.y;
  }
  if (N % 2 && N - 1 < last) w[N - 1] = *(const u32*)(codes + 4 * code_word<BITS>(N - 1, lane));
}

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack_half(float lo, float hi) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) { u32 y; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) { u32 y; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c)); return y; }
__device__ __forceinline__ u32 max_half2(u32 a, u32 b) { u32 y; asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
__device__ __forceinline__ float2 unpack_half(u32 x) { return __half22float2(*reinterpret_cast<__half2*>(&x)); }
__device__ __forceinline__ u32 transpose8x8(u32 x) { u32 y; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma(d, a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// mma of the codes of one step. A masked code is the fp16 subnormal c * 2^-24, exact in the tensor core. Of 4-bit
// codes a whole byte is low + 16 * high, which is what rows g + 8 are given: the caller takes `upper` of the sums.
template <int BITS>
__device__ __forceinline__ void mma_codes(float (&d)[4], const u32 (&w)[WORDS<BITS>], int step, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  const u32 x = w[step * (BITS / 4)], odd = __byte_perm(x, 0, 0x4341);
  if (BITS == 4) mma(d, x & 0x000f000fu, x & 0x00ff00ffu, odd & 0x000f000fu, odd, b0, b1, c0, c1, c2, c3);
  else {
    const u32 y = w[(2 * step + 1) % WORDS<BITS>];  // the remainder for the sake of 4 bits, which compile this too
    mma(d, x & 0x00ff00ffu, odd, y & 0x00ff00ffu, __byte_perm(y, 0, 0x4341), b0, b1, c0, c1, c2, c3);
  }
}
template <int BITS>
__device__ __forceinline__ void mma_codes(float (&d)[4], const u32 (&w)[WORDS<BITS>], int step, u32 b0, u32 b1) {
  mma_codes<BITS>(d, w, step, b0, b1, d[0], d[1], d[2], d[3]);
}
// The sum of row g + 8 times what `UPPER` divides by, from that of row g and from what mma_codes gave.
template <int BITS> __device__ __forceinline__ float upper(float low, float both) { return BITS == 4 ? both - low : both; }
template <int BITS> constexpr float UPPER = BITS == 4 ? .0625f : 1.f;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <class T> struct Same { static constexpr bool half = false; };
template <> struct Same<__half> { static constexpr bool half = true; };

// One row of D channels in a warp: lane l holds channels l + 32 i, nothing past D.
struct Row {
  float v[PER_LANE];
};

// x with the sign of channel lane + 32 i of the rotation. i is known when this is compiled, so that the signs are
// immediates: a first load from constant memory takes most of a microsecond.
__device__ __forceinline__ float with_sign(float x, int lane, int i) {
  constexpr u32 signs[] = LONGLEAF_SIGNS;
  return __uint_as_float(__float_as_uint(x) ^ (signs[i] << (31 - lane) & 0x80000000u));
}

// x R, or x R^T (INVERSE), by butterflies; kernels/formats.py has R. Nothing where AFFINE. `scratch`: D floats of this warp in
// shared memory, used only where D is not a power of two.
template <bool INVERSE>
__device__ __forceinline__ void rotate(Row& x, int lane, float* scratch) {
  if (AFFINE) return;
  const float norm = rsqrtf((float)D);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int c = lane + 32 * i;
    if (c >= D) x.v[i] = 0;
    else if (!INVERSE) x.v[i] = with_sign(x.v[i], lane, i);
  }
#pragma unroll
  for (int h = 1; h < INNER && h < 32; h *= 2)
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float y = __shfl_xor_sync(~0u, x.v[i], h);
      x.v[i] = lane & h ? y - x.v[i] : x.v[i] + y;
    }
#pragma unroll
  for (int h = 32; h < INNER; h *= 2)
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (!(i & (h / 32))) {
        const int k = (i + h / 32) % PER_LANE;
        const float a = x.v[i], b = x.v[k];
        x.v[i] = a + b;
        x.v[k] = a - b;
      }
  if (NUM_OUTER > 1) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) scratch[lane + 32 * i] = x.v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int c = lane + 32 * i, row = c / INNER, inner = c % INNER;
      if (c >= D) break;
      float sum = 0;
#pragma unroll 4
      for (int k = 0; k < NUM_OUTER; k++) {
        const float y = scratch[k * INNER + inner];
        const u32 minus = INVERSE ? OUTER[row] >> k : OUTER[k] >> row;
        sum += minus & 1 ? -y : y;
      }
      x.v[i] = sum;
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) x.v[i] = INVERSE ? with_sign(x.v[i] * norm, lane, i) : x.v[i] * norm;
}

// ---- arrays as MLX hands them over

// (batch, head, token, channel) with element strides.
template <class T>
struct Strided {
  const T* data;
  i64 batch, head, token, channel;
  __device__ const T* at(int b, int h, int n) const { return data + b * batch + h * head + n * token; }
  // whether 16-byte loads of 8 channels are allowed
  __device__ bool vectors() const {
    return channel == 1 && !(((u64)data | (u64)(batch * sizeof(T)) | (u64)(head * sizeof(T)) | (u64)(token * sizeof(T))) & 15);
  }
};

// Field by field: a choice between two structs would put both into local memory.
template <class T>
__device__ __forceinline__ Strided<T> choose(bool first, const Strided<T>& x, const Strided<T>& y) {
  return {first ? x.data : y.data, first ? x.batch : y.batch, first ? x.head : y.head, first ? x.token : y.token, first ? x.channel : y.channel};
}

template <class T>
struct Call {
  Strided<T> q, sinks_k, sinks_v, tail_k, tail_v;
  const u32* tiles;
  i64 tile_pitch, head_pitch;  // words from one tile of a head to the next, from head to head
  const int* tail_lengths;  // or null: all of the tail counts
  int batch, num_heads, group, num_queries, num_sinks, num_tail;
  int window;   // 0: no limit
  float scale;  // of q . k, in base-2 logits

  __device__ int rows() const { return batch * group * num_queries; }
  __device__ int rows_per_batch() const { return group * num_queries; }
  __device__ int tail_length(int b) const { return tail_lengths ? tail_lengths[b] : num_tail; }
  // the q of row r of KV head h: rows run over (batch, query head of the group, query)
  __device__ const T* q_row(int h, int r) const {
    if (rows_per_batch() == group && batch == 1) return q.at(0, h * group + r, 0);
    const int b = r / rows_per_batch(), x = r % rows_per_batch();
    return q.at(b, h * group + x / num_queries, x % num_queries);
  }
};

__device__ __forceinline__ int pieces(int n, int step) { return (n + step - 1) / step; }
// How a launch is cut: plan.py's `Cut`, which comes by value as the shape of an array, each number plus one; a division
// by a number of run time would cost the first fetch a tenth of a microsecond. The grid is one row of CTAs:
// `streams` for every (row group, KV head), each with a range of the tiles, then `workers` that share the dense items.
// An item is one of `dense` shares of the sinks and tails of a (row group, KV head). Every stream and every share is
// a partial. Dense tokens are cut into pieces of 16 or 32: the sinks, then the tails of the batch rows of the group.
struct Cut {
  int streams, row_groups, dense, workers;
  u32 each, more;  // slices or units of a ring: `each`, and one more for the first `more` rings of a head

  template <class S>
  __device__ explicit Cut(const S& shape)
      : streams(shape[0] - 1), row_groups(shape[1] - 1), dense(shape[2] - 1), workers(shape[3] - 1), each(shape[4] - 1), more(shape[5] - 1) {}
  __device__ int partials() const { return streams + dense; }
  __device__ int begin(u32 ring) const { return ring * each + min(ring, more); }
};

}  // namespace longleaf
