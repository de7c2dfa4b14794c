// Merge of the partials of one (row, head): take the sink logit into the sum, undo the rotation.
//
// Where a CTA has 8 rows at most, by the last CTA of a (KV head, row group) to end its partials; else in a second
// launch, whose grid is (rows, KV heads), 8 warps. Warps share a row: each takes every n-th partial, a lane every 32nd
// channel, and makes the weights anew rather than wait for another's; all first loads are in flight before one is
// used. The order of sums is the same whichever CTA is last. Accumulation: fp32.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int COMBINE_THREADS = 256;

// po: [head][partial][row][D], pl: [head][partial][row] base-2 log-sum-exp. sink_logits: per query head, or null.
template <class T, class S>
struct Merge {
  const float *po, *pl;
  const S* sink_logits;
  T* out;
  int partials, rows, heads, group, num_queries;

  // Rows r0..r0 + num_rows of KV head h; by all NW warps. parts: one row of floats a warp, in shared memory.
  template <int NW>
  __device__ __forceinline__ void run(int h, int r0, int num_rows, float (*parts)[D]) const {
    constexpr int AHEAD = PER_LANE <= 4 ? 4 : 1;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int share = max(1, NW / num_rows), at_once = NW / share;  // warps of a row, rows at a time
#pragma unroll 1
    for (int first = 0; first < num_rows; first += at_once) {
      const int r = first + warp / share, sub = warp % share, row = r0 + r;
      const bool busy = r < num_rows && warp < share * at_once;
      Row o;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) o.v[i] = 0;
      float sum = 0;
      if (busy) {
        const float* from = po + ((i64)h * partials * rows + row) * D;
        const float* lse = pl + (i64)h * partials * rows + row;
        const float early = lane < partials ? __ldcg(lse + (i64)lane * rows) : -INFINITY;
        float x[AHEAD][PER_LANE], own[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
          const int s = sub + share * k;
          own[k] = s < partials ? __ldcg(lse + (i64)s * rows) : -INFINITY;
#pragma unroll
          for (int i = 0; i < PER_LANE; i++) x[k][i] = s < partials && lane + 32 * i < D ? __ldcg(from + (i64)s * rows * D + lane + 32 * i) : 0.f;
        }
        const float sink = sink_logits ? (float)sink_logits[h * group + row / num_queries % group] * LOG2E : -INFINITY;
        float top = fmaxf(NONE, fmaxf(sink, early));
#pragma unroll 1
        for (int s = lane + 32; s < partials; s += 32) top = fmaxf(top, __ldcg(lse + (i64)s * rows));
        top = warp_max(top);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
          const float e = ex2(own[k] - top);
#pragma unroll
          for (int i = 0; i < PER_LANE; i++) o.v[i] += e * x[k][i];
        }
#pragma unroll 4
        for (int s = sub + share * AHEAD; s < partials; s += share) {
          const float e = ex2(__ldcg(lse + (i64)s * rows) - top);
#pragma unroll
          for (int i = 0; i < PER_LANE; i++)
            if (lane + 32 * i < D) o.v[i] += e * __ldcg(from + (i64)s * rows * D + lane + 32 * i);
        }
        if (sub == 0) {
          sum = ex2(early - top);
#pragma unroll 1
          for (int s = lane + 32; s < partials; s += 32) sum += ex2(__ldcg(lse + (i64)s * rows) - top);
          sum = warp_sum(sum) + ex2(sink - top);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
          if (lane + 32 * i < D) parts[warp][lane + 32 * i] = o.v[i];
      }
      __syncthreads();
      if (busy && sub == 0) {
#pragma unroll 1
        for (int w = 1; w < share; w++)
#pragma unroll
          for (int i = 0; i < PER_LANE; i++)
            if (lane + 32 * i < D) o.v[i] += parts[warp + w][lane + 32 * i];
        __syncwarp();
        rotate<true>(o, lane, parts[warp]);
        const int b = row / (group * num_queries), in = row % (group * num_queries);  // late: they would delay the loads
        T* to = out + (((i64)b * heads + h) * group * num_queries + in) * D;
        const float inverse = 1.f / sum;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
          if (lane + 32 * i < D) to[lane + 32 * i] = from_float<T>(o.v[i] * inverse);
      }
      __syncthreads();
    }
  }
};

// Whether this CTA is the last of `total` to come here; all that they wrote before is then visible to it. `counter`
// is 0 before the first and again after the last. flag: a word of shared memory that nothing else uses meanwhile.
__device__ __forceinline__ bool last_of(u32* counter, int total, u32* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *flag = atomicInc(counter, total - 1) == total - 1;
    __threadfence();
  }
  __syncthreads();
  return *flag;
}

template <class T, class S>
__device__ __forceinline__ void combine(const float* po, const float* pl, const S* sink_logits, T* out, int partials, int rows, int group,
                                        int num_queries) {
  __shared__ float parts[COMBINE_THREADS / 32][D];
  const Merge<T, S> merge = {po, pl, sink_logits, out, partials, rows, (int)gridDim.y, group, num_queries};
  merge.template run<COMBINE_THREADS / 32>(blockIdx.y, blockIdx.x, 1, parts);
}

}  // namespace longleaf
