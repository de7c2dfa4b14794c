// What split.cuh does before its loop: bulk copies, and queries into shared memory.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr float SLACK = 4.f;        // in base-2 logits
constexpr float CODE = 16777216.f;  // a code c stands in the tensor core as c * 2^-24
constexpr int PAIRS = (STEPS + 1) / 2;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(u32 a) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(a) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 a, u32 phase) {
  u32 ok = 0;
  while (!ok)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok) : "r"(a), "r"(phase) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}
__device__ __forceinline__ bool elect_one() {
  u32 p;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(p));
  return p;
}
#endif

// q of this CTA's rows: rotated and plain, as B fragments in fp16, each row divided by its power of two.
// Rotated fragments hold channels in order; plain ones so that a lane's are 8 neighbours in the mean and in dense K.
//
// In two steps, so that the loads are on their way before tiles fill the queues to memory. A warp has `rows[i]` =
// row warp + i NW of the CTA.
template <class T, int NB, int NW>
__device__ __forceinline__ void load_queries(const Call<T>& c, int h, int r0, T (&rows)[(8 * NB + NW - 1) / NW][PER_LANE]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int x = 0; x < (8 * NB + NW - 1) / NW; x++) {
    const int r = r0 + warp + x * NW;
    const bool there = warp + x * NW < 8 * NB && r < c.rows();
    const T* q = c.q_row(h, there ? r : 0);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      rows[x][i] = there && ch < D ? q[ch * c.q.channel] : from_float<T>(0.f);
    }
  }
}

template <class T, int NB, int NW>
__device__ __forceinline__ void store_queries(const T (&rows)[(8 * NB + NW - 1) / NW][PER_LANE], float scale, __half* qr, __half* qp, float* starts,
                                              float* row_scales, float* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int x = 0; x < (8 * NB + NW - 1) / NW; x++) {
    const int r = warp + x * NW, nb = r >> 3, g = r & 7;
    if (r >= 8 * NB) break;
    Row plain, rotated;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) plain.v[i] = rotated.v[i] = (float)rows[x][i];
    float top = 0;
    rotate<false>(rotated, lane, scratch);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) top = fmaxf(top, fmaxf(fabsf(plain.v[i]), fabsf(rotated.v[i])));
    top = warp_max(top);
    const int exponent = max(-126, min(126, (int)(__float_as_uint(top) >> 23) - 127));
    const float down = __uint_as_float((u32)(127 - exponent) << 23), up = __uint_as_float((u32)(127 + exponent) << 23);
    float sums[GROUPS];
#pragma unroll
    for (int k = 0; k < GROUPS; k++) sums[k] = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int ch = lane + 32 * i;
      if (ch >= D) break;
      const __half x = __float2half_rn(rotated.v[i] * down);
      {
        const int step = ch >> 4, in = ch & 15, l2 = 4 * g + (in & 7) / 2;
        qr[(((step >> 1) * NB + nb) * 32 + l2) * 8 + (step & 1) * 4 + (in >> 3) * 2 + (in & 1)] = x;
      }
      {
        int pair = ch >> 5, l2, place;
        if (D % 32 && ch >= D - 16) l2 = 4 * g + (ch - (D - 16)) / 4, place = (ch & 3) >> 1;
        else l2 = 4 * g + (ch & 31) / 8, place = ((ch & 2) << 1) | ((ch & 4) >> 1);
        // place 0, 2: even step, b0 and b1; 4, 6: odd step (in halves); the last 16 channels have one step
        const int at = D % 32 && ch >= D - 16 ? place * 2 : place;
        qp[((pair * NB + nb) * 32 + l2) * 8 + at + (ch & 1)] = __float2half_rn(plain.v[i] * down);
      }
#pragma unroll
      for (int k = 0; k < GROUPS; k++) sums[k] += ch / GROUP == k ? __half2float(x) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
      const float x = warp_sum(sums[k]) * (-midrise(K_BITS) / CODE);
      if (lane) continue;
      float* start = starts + ((k * NB + nb) * 4 + (g >> 1)) * 4 + (g & 1);
      start[0] = x;
      start[2] = K_BITS == 4 ? 17.f * x : x;  // of rows g + 8, which 4-bit codes give low + 16 * high
    }
    if (lane == 0) row_scales[r] = scale * up;
  }
}

// The bias for P, 2^bias larger than exp2(score - max), and the bound on value scales for which it is safe: twice
// the power of two above `top`, so that a few growing slices need no change. 2^(bias + SLACK) * bound = 2^15.
__device__ __forceinline__ void choose_bias(float top, float& bias, u32& bound) {
  const int exponent = (int)(__float_as_uint(fmaxf(top, 5.9604645e-8f)) >> 23) - 126 + 1;
  const float limit = exponent > 15 ? 65504.f : __uint_as_float((u32)(127 + exponent) << 23);
  bound = pack_half(limit, limit);
  bias = fminf(11.f, 11.f - exponent);
}

}  // namespace longleaf
