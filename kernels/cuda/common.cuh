// What every kernel of this folder shares: the device order of a tile, instructions, the rotation.
//
// A module is compiled for one head size. The launcher puts these before the include:
//   LONGLEAF_D       the head size
//   LONGLEAF_INNER   the power of two in H = H_outer (x) H_inner
//   LONGLEAF_SIGNS   the rotation's signs, one bit a channel, 1 meaning -1
//   LONGLEAF_OUTER   the signs of H_outer, one word a row ({0} where D is a power of two)
//
// Device order of a tile (one KV head, 128 tokens; the canonical order is kernels/formats.py): four slices
// of 32 tokens, then the mean as it was. All numbers of a slice stand where a lane of mma.m16n8k16 wants
// them; `lane` = 4g + t. Byte y of a code word holds two rows of the matrix tile, g low and g + 8 high.
//
//   | part     | bytes  | position                  | holds                                                  |
//   |----------|--------|---------------------------|--------------------------------------------------------|
//   | k_codes  | 16 D   | [j 2][code_word(i, lane)] | token 16j + g (+ 8), channel 16i + 2t + 8 (y&1) + (y>>1) |
//   | v_codes  | 16 D   | [j 2][code_word(i, lane)] | token 16j + 2t + 8 (y&1) + (y>>1), channel 16i + g (+ 8) |
//   | k_scales | 64 G   | [g][group][j][p]          | token 16j + g + 8p                                     |
//   | v_scales | 64 G   | [j][t][group][p][e]       | token 16j + 2t + 8p + e                                |
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

constexpr int K_CODES = 0;
constexpr int V_CODES = 16 * D;
constexpr int K_SCALES = 32 * D;
constexpr int V_SCALES = K_SCALES + 64 * GROUPS;
constexpr int SLICE = V_SCALES + 64 * GROUPS;
constexpr int MEAN = 4 * SLICE;
constexpr int MEAN_BYTES = 2 * D;
constexpr int TILE = MEAN + MEAN_BYTES;
constexpr int STAGE = SLICE + MEAN_BYTES;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NONE = -1e30f;  // a maximum over nothing

__constant__ u32 OUTER[] = LONGLEAF_OUTER;
constexpr int INNER = LONGLEAF_INNER;
constexpr int NUM_OUTER = D / INNER;

// The words of one lane in 16 tokens of codes are loaded four, then two, then one at a time.
__device__ constexpr int code_word(int step, int lane) {
  constexpr int QUADS = STEPS / 4;
  if (step < 4 * QUADS) return ((step / 4) * 32 + lane) * 4 + step % 4;
  if (STEPS % 4 >= 2 && step < 4 * QUADS + 2) return 128 * QUADS + lane * 2 + step % 4;
  return 128 * QUADS + (STEPS % 4 >= 2 ? 64 : 0) + lane;
}

__device__ __forceinline__ void load_codes(const u8* codes, int lane, int first, int last, u32 (&w)[STEPS]) {
#pragma unroll
  for (int i = 0; i < STEPS / 4; i++)
    if (4 * i >= first && 4 * i < last) {
      const uint4 x = *(const uint4*)(codes + 4 * code_word(4 * i, lane));
      w[4 * i] = x.x; w[4 * i + 1] = x.y; w[4 * i + 2] = x.z; w[4 * i + 3] = x.w;
    }
  constexpr int REST = STEPS / 4 * 4;
  if (STEPS % 4 >= 2 && REST < last) {
    const uint2 x = *(const uint2*)(codes + 4 * code_word(REST, lane));
    w[REST] = x.x; w[STEPS > REST + 1 ? REST + 1 : REST] = x.y;
  }
  if (STEPS % 2 && STEPS - 1 < last) w[STEPS - 1] = *(const u32*)(codes + 4 * code_word(STEPS - 1, lane));
}

__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack_half(float lo, float hi) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) { u32 y; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
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
// mma of one word of codes. A masked nibble is the fp16 subnormal c * 2^-24, exact in the tensor core; a whole
// byte is low + 16 * high, which is what rows g + 8 are given: the caller takes (d[2] - d[0]) / 16.
__device__ __forceinline__ void mma_codes(float (&d)[4], u32 w, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  const u32 u = __byte_perm(w, 0, 0x4341);
  mma(d, w & 0x000f000fu, w & 0x00ff00ffu, u & 0x000f000fu, u, b0, b1, c0, c1, c2, c3);
}

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

// x R, or x R^T (INVERSE), by butterflies; kernels/formats.py has R. `scratch`: D floats of this warp in
// shared memory, used only where D is not a power of two.
template <bool INVERSE>
__device__ __forceinline__ void rotate(Row& x, int lane, float* scratch) {
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
  int batch, num_heads, group, num_queries, num_sinks, num_tail, num_tiles;
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
