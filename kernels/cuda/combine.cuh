// Second launch: merge the partials of one (row, head), take the sink logit into the sum, undo the rotation.
//
// Grid: (rows, KV heads), 8 warps. A warp takes every 8th partial, a lane every 32nd channel, and each warp makes the
// weights anew rather than wait for another's; all first loads are in flight before one is used. Accumulation: fp32.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int COMBINE_THREADS = 256;

// po: [head][partial][row][D], pl: [head][partial][row] base-2 log-sum-exp. sink_logits: per query head, or null.
template <class T, class S>
__device__ __forceinline__ void combine(const float* __restrict__ po, const float* __restrict__ pl, const S* sink_logits, T* __restrict__ out, int partials,
                                        int rows, int group, int num_queries) {
  constexpr int WARPS = COMBINE_THREADS / 32, AHEAD = PER_LANE <= 4 ? 4 : 1;
  __shared__ float parts[WARPS][D];
  const int h = blockIdx.y, row = blockIdx.x, heads = gridDim.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  po += ((i64)h * partials * rows + row) * D;
  pl += (i64)h * partials * rows + row;
  const float first = lane < partials ? pl[(i64)lane * rows] : -INFINITY;
  float x[AHEAD][PER_LANE], own[AHEAD];
#pragma unroll
  for (int k = 0; k < AHEAD; k++) {
    const int s = warp + WARPS * k;
    own[k] = s < partials ? pl[(i64)s * rows] : -INFINITY;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x[k][i] = s < partials && lane + 32 * i < D ? po[(i64)s * rows * D + lane + 32 * i] : 0.f;
  }
  const float sink = sink_logits ? (float)sink_logits[h * group + row / num_queries % group] * LOG2E : -INFINITY;
  float top = fmaxf(NONE, fmaxf(sink, first));
#pragma unroll 1
  for (int s = lane + 32; s < partials; s += 32) top = fmaxf(top, pl[(i64)s * rows]);
  top = warp_max(top);
  Row o;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) o.v[i] = 0;
#pragma unroll
  for (int k = 0; k < AHEAD; k++) {
    const float e = ex2(own[k] - top);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) o.v[i] += e * x[k][i];
  }
#pragma unroll 1
  for (int s = warp + WARPS * AHEAD; s < partials; s += WARPS) {
    const float e = ex2(pl[(i64)s * rows] - top);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < D) o.v[i] += e * po[(i64)s * rows * D + lane + 32 * i];
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < D) parts[warp][lane + 32 * i] = o.v[i];
  __syncthreads();
  if (warp) return;
  float sum = ex2(first - top);
#pragma unroll 1
  for (int s = lane + 32; s < partials; s += 32) sum += ex2(pl[(i64)s * rows] - top);
  sum = warp_sum(sum) + ex2(sink - top);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
#pragma unroll
    for (int w = 1; w < WARPS; w++)
      if (lane + 32 * i < D) o.v[i] += parts[w][lane + 32 * i];
  __syncwarp();
  rotate<true>(o, lane, parts[0]);
  const int b = row / (group * num_queries), r = row % (group * num_queries);  // late: they would delay the loads
  out += (((i64)b * heads + h) * group * num_queries + r) * D;
  const float inverse = 1.f / sum;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < D) out[lane + 32 * i] = from_float<T>(o.v[i] * inverse);
}

}  // namespace longleaf
