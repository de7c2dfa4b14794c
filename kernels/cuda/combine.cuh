// Second launch: merge the partials of one (row, head), take the sink logit into the sum, undo the rotation.
//
// Grid: (rows, KV heads), 256 threads. Column c4 of four channels and slot w: threads of one slot read every
// SLOTS-th partial, all loads in flight before the first is used. Accumulation: fp32.
#pragma once
#include "common.cuh"

namespace longleaf {

constexpr int COMBINE_THREADS = 256;
constexpr int MAX_PARTIALS = 512;

// po: [head][partial][row][D], pl: [head][partial][row] base-2 log-sum-exp. sink_logits: per query head, or null.
template <class T, class S>
__device__ __forceinline__ void combine(const float* __restrict__ po, const float* __restrict__ pl, const S* sink_logits, T* __restrict__ out, int partials,
                                        int rows, int group, int num_queries) {
  constexpr int COLUMNS = D / 4, SLOTS = COMBINE_THREADS / COLUMNS, AHEAD = (40 + SLOTS - 1) / SLOTS;
  __shared__ float weight[MAX_PARTIALS];
  __shared__ __align__(16) float parts[SLOTS * D];
  __shared__ float total;
  const int h = blockIdx.y, row = blockIdx.x, heads = gridDim.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int slot = tid / COLUMNS, c4 = tid % COLUMNS * 4;
  po += ((i64)h * partials * rows + row) * D + c4;
  pl += (i64)h * partials * rows + row;
  float4 v[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    const int s = slot + i * SLOTS;
    v[i] = make_float4(0, 0, 0, 0);
    if (slot < SLOTS && s < partials) v[i] = *(const float4*)(po + (i64)s * rows * D);
  }
  if (warp == 0) {
    float sink = -INFINITY;
    if (sink_logits) sink = (float)sink_logits[h * group + row / num_queries % group] * LOG2E;
    float top = fmaxf(NONE, sink);
    float e[4];  // the first 128 partials stay in registers, so that one round trip to memory is enough
#pragma unroll
    for (int i = 0; i < 4; i++) e[i] = lane + 32 * i < partials ? pl[(i64)(lane + 32 * i) * rows] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) top = fmaxf(top, e[i]);
    for (int s = lane + 128; s < partials; s += 32) top = fmaxf(top, pl[(i64)s * rows]);
    top = warp_max(top);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float y = ex2(e[i] - top);
      if (lane + 32 * i < partials) weight[lane + 32 * i] = y;
      sum += y;
    }
    for (int s = lane + 128; s < partials; s += 32) {
      const float y = ex2(pl[(i64)s * rows] - top);
      weight[s] = y;
      sum += y;
    }
    sum = warp_sum(sum) + ex2(sink - top);
    if (lane == 0) total = sum;
  }
  __syncthreads();
  if (slot < SLOTS) {
    float4 a = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int s = slot + i * SLOTS;
      const float e = s < partials ? weight[s] : 0.f;
      a.x += e * v[i].x; a.y += e * v[i].y; a.z += e * v[i].z; a.w += e * v[i].w;
    }
#pragma unroll 4
    for (int s = slot + AHEAD * SLOTS; s < partials; s += SLOTS) {
      const float e = weight[s];
      const float4 y = *(const float4*)(po + (i64)s * rows * D);
      a.x += e * y.x; a.y += e * y.y; a.z += e * y.z; a.w += e * y.w;
    }
    *(float4*)&parts[slot * D + c4] = a;
  }
  __syncthreads();
  if (warp) return;
  Row o;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    o.v[i] = 0;
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
      if (lane + 32 * i < D) o.v[i] += parts[s * D + lane + 32 * i];
  }
  __syncwarp();
  rotate<true>(o, lane, parts);
  const int b = row / (group * num_queries), x = row % (group * num_queries);  // late: they would delay the loads
  out += (((i64)b * heads + h) * group * num_queries + x) * D;
  const float inverse = 1.f / total;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < D) out[lane + 32 * i] = from_float<T>(o.v[i] * inverse);
}

}  // namespace longleaf
