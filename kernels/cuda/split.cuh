// First launch: partial attention of one KV head over a range of its tokens, for queries of 16 bits.
//
// Grid: `Cut` in common.cuh, row groups of 8 NB, NW warps.
//
// One warp is one stream. It owns a run of 32-token slices and a ring of NS stages in shared memory that only it
// fills and reads: no barrier and no atomic in the loop. The next slice is asked for when the current one has
// arrived, before it is computed. BULK: cp.async.bulk on an mbarrier (sm_90 and later), else cp.async.
//
//   scores   A = K codes (16 tokens x 16 channels), B = q: 8 rows. Accumulators start at -midrise * 2^-24 * sum(q),
//            which takes that offset out for nothing; scales multiply in fp32.
//   softmax  base 2, per warp, lazy: rescaled only when a score passes the kept maximum by 2^SLACK.
//   values   A = V codes (channels x tokens), B = P * scale in fp16. Each slice starts from zero and is added in
//            fp32: the tensor core truncates when it accumulates, and codes are all positive (up to 4e-3 otherwise).
//   affine   code * s + b = (code - 7.5) * s + (b + 7.5 s), whose last term is small: it adds to what `weighted` sums.
//
// Ranges: q is divided by a power of two per row so that any float input fits in fp16. P is kept 2^bias larger,
// with bias chosen from the largest value scale seen, so that P * scale neither underflows nor overflows.
// Accumulation: fp32.
#pragma once
#include "combine.cuh"
#include "common.cuh"
#include "dense.cuh"
#include "queries.cuh"

namespace longleaf {

// Shared memory, in bytes: rings, mbarriers, (max, sum) per warp and row, q rotated and not, start values, row
// scales, and a row of floats per warp where the rotation needs it.
template <int NB, int NW, int NS>
struct Shared {
  static constexpr int BARS = NW * NS * STAGE;
  static constexpr int ML = BARS + NW * NS * 8;
  static constexpr int Q_ROTATED = (ML + NW * NB * 64 + 15) / 16 * 16;
  static constexpr int Q_PLAIN = Q_ROTATED + NB * PAIRS * 512;
  static constexpr int STARTS = Q_PLAIN + NB * PAIRS * 512;
  static constexpr int ROW_SCALES = STARTS + GROUPS * NB * 64;
  static constexpr int SCRATCH = ROW_SCALES + NB * 32;
  static constexpr int BYTES = SCRATCH + (NUM_OUTER > 1 ? NW * D * 4 : 0);
  static_assert(NS * STAGE >= NB * 8 * O_PITCH * 4, "a ring must hold its warp's rows of o");
};

// A warp's ring of slices of one head. BULK or not, `ask` and `wait` are called by all lanes.
template <int NS, bool BULK>
struct Ring {
  u8* stages;
  u32 stages_shared, bars;
  const u8* head;  // the head's part of tile 0
  i64 tile_pitch;  // bytes from a tile to the next one of this head
  u64 policy;

  __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
    if (BULK) {
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      if (elect_one()) {
#pragma unroll
        for (int i = 0; i < NS; i++) barrier_init(bars + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
    }
#endif
  }
  // Start slice s into a stage, the tile's mean with it where `mean`.
  __device__ __forceinline__ void ask(int stage, int s, bool mean, bool exists) {
    const u8* tile = head + (s >> 2) * tile_pitch;
    const u8* slice = tile + (s & 3) * SLICE;
    const u32 to = stages_shared + stage * STAGE;
#if __CUDA_ARCH__ >= 900
    if (BULK) {
      if (exists && elect_one()) {
        const u32 bar = bars + 8 * stage;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(mean ? STAGE : SLICE) : "memory");
        bulk_copy(to, slice, SLICE, bar, policy);
        if (MEAN_BYTES && mean) bulk_copy(to + SLICE, tile + MEAN, MEAN_BYTES, bar, policy);
      }
      return;
    }
#endif
    if (exists) {
      const int lane = threadIdx.x & 31;
      for (int i = lane; i < SLICE / 16; i += 32)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(slice + 16 * i) : "memory");
      if (mean)
        for (int i = lane; i < MEAN_BYTES / 16; i += 32)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + SLICE + 16 * i), "l"(tile + MEAN + 16 * i) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void wait(int stage, u32 phase) {
#if __CUDA_ARCH__ >= 900
    if (BULK) {
      barrier_wait(bars + 8 * stage, phase);
      return;
    }
#endif
    asm volatile("cp.async.wait_group %0;" ::"n"(NS - 2) : "memory");
    __syncwarp();
  }
};

// QS: q's fragments are read from shared memory at each use, else kept in registers. counters: where the last CTA
// merges, one a (KV head, row group), else null.
template <class T, class S, int NB, int NW, int NS, bool QS, bool BULK>
__device__ __forceinline__ void split(const Call<T>& c, const Cut all, u8* smem, float* po, float* pl, u32* counters,
                                      const S* sink_logits, T* out) {
  using M = Shared<NB, NW, NS>;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform for the compiler
  const int g = lane >> 2, t = lane & 3;
  const int rows = c.rows(), groups = c.num_heads * all.row_groups;
  const i64 partial = (i64)rows * D;
  float2* ml = (float2*)(smem + M::ML);
  // Called by all threads when a partial is written.
  auto done = [&, po, pl](int h, int r0) {
    if (!counters || !last_of(counters + h * all.row_groups + r0 / (8 * NB), all.partials(), (u32*)ml)) return;
    const Merge<T, S> merge = {po, pl, sink_logits, out, all.partials(), rows, c.num_heads, c.group, c.num_queries};
    merge.template run<NW>(h, r0, min(8 * NB, rows - r0), (float(*)[D])smem);
  };

  if (blockIdx.x >= groups * all.streams) {
#pragma unroll 1
    for (int i = blockIdx.x - groups * all.streams; i < groups * all.dense; i += all.workers) {
      const int h = i % c.num_heads, r0 = i / c.num_heads % all.row_groups * 8 * NB, share = i / groups;
      dense_pieces<T, NB, NW>(c, h, r0, share, all.dense, (float*)(smem + warp * NS * STAGE), ml);
      __syncthreads();
      const i64 p = (i64)h * all.partials() + all.streams + share;
      dense_merge<NB, NW>(smem, NS * STAGE, ml, r0, rows, (float*)(smem + M::SCRATCH) + warp * D, po + p * partial, pl + p * rows);
      done(h, r0);
      __syncthreads();
    }
    return;
  }
  const int cta = (u32)blockIdx.x / (u32)groups, at = blockIdx.x - cta * groups;
  const int h = all.row_groups == 1 ? at : at % c.num_heads, r0 = all.row_groups == 1 ? 0 : at / c.num_heads * 8 * NB;
  const int s0 = all.begin(cta * NW + warp), s1 = all.begin(cta * NW + warp + 1);

  Ring<NS, BULK> ring;
  ring.stages = smem + warp * NS * STAGE;
  ring.stages_shared = shared_address(ring.stages);
  ring.bars = shared_address(smem + M::BARS + warp * NS * 8);
  ring.head = (const u8*)(c.tiles + h * c.head_pitch);
  ring.tile_pitch = 4 * c.tile_pitch;
  ring.init();
  {
    T queries[(8 * NB + NW - 1) / NW][PER_LANE];
    load_queries<T, NB, NW>(c, h, r0, queries);
#pragma unroll
    for (int i = 0; i < NS; i++) ring.ask(i, s0 + i, i == 0 || !((s0 + i) & 3), s0 + i < s1);
    store_queries<T, NB, NW>(queries, c.scale, (__half*)(smem + M::Q_ROTATED), (__half*)(smem + M::Q_PLAIN), (float*)(smem + M::STARTS),
                                 (float*)(smem + M::ROW_SCALES), (float*)(smem + M::SCRATCH) + warp * D);
  }
  __syncthreads();

  const uint4* q_rotated = (const uint4*)(smem + M::Q_ROTATED);
  const uint4* q_plain = (const uint4*)(smem + M::Q_PLAIN);
  const float4* starts = (const float4*)(smem + M::STARTS);
  constexpr int KEPT = QS ? 1 : PAIRS;
  uint4 kept[KEPT][NB];
  if (!QS)
#pragma unroll
    for (int j = 0; j < KEPT; j++)
#pragma unroll
      for (int n = 0; n < NB; n++) kept[j][n] = q_rotated[(j * NB + n) * 32 + lane];
  // b0 and b1 of one 16-channel step, zero outside the scale group
  auto query = [&](int step, int n, int group, u32& b0, u32& b1) {
    const uint4 x = QS ? q_rotated[((step >> 1) * NB + n) * 32 + lane] : kept[QS ? 0 : step >> 1][n];
    b0 = step & 1 ? x.z : x.x;
    b1 = step & 1 ? x.w : x.y;
    if (16 * step < group * GROUP) b0 = 0;
    if (16 * step + 8 >= (group + 1) * GROUP) b1 = 0;
  };
  float scale[NB][2];
#pragma unroll
  for (int n = 0; n < NB; n++) {
    scale[n][0] = ((const float*)(smem + M::ROW_SCALES))[8 * n + 2 * t] * CODE;
    scale[n][1] = ((const float*)(smem + M::ROW_SCALES))[8 * n + 2 * t + 1] * CODE;
  }

  float o[STEPS][NB][4], weighted[GROUPS][NB][2], m[NB][2], l[NB][2], mean[NB][2];
  float bias = 11.f;
  u32 largest = 0;  // value scales for which `bias` is safe, as two halves
#pragma unroll
  for (int n = 0; n < NB; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int i = 0; i < STEPS; i++) o[i][n][e] = o[i][n][e + 2] = 0;
#pragma unroll
      for (int k = 0; k < GROUPS; k++) weighted[k][n][e] = 0;
      m[n][e] = NONE;
      l[n][e] = mean[n][e] = 0;
    }

  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int s = s0; s < s1; s++) {
    ring.wait(stage, phase);
    const bool new_tile = s == s0 || !(s & 3);
    if (s > s0) {
      const int next = s + NS - 1;
      ring.ask(stage == 0 ? NS - 1 : stage - 1, next, !(next & 3), next < s1);
      __syncwarp();
    }
    const u8* slice = ring.stages + stage * STAGE;
    if (!AFFINE && new_tile) {
      // q . mean: rows 0-7 of A hold an even step, rows 8-15 an odd one; the other half of each product is unused
      float even[NB][4], odd[NB][4];
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) even[n][i] = odd[n][i] = 0;
#pragma unroll
      for (int j = 0; j < D / 32; j++) {
        const uint4 w = *(const uint4*)(slice + SLICE + (j * 4 + t) * 16);
#pragma unroll
        for (int n = 0; n < NB; n++) {
          const uint4 b = q_plain[(j * NB + n) * 32 + lane];
          mma(even[n], w.x, w.y, w.z, w.w, b.x, b.y);
          mma(odd[n], w.x, w.y, w.z, w.w, b.z, b.w);
        }
      }
      if (D % 32) {
        const uint2 w = *(const uint2*)(slice + SLICE + D / 32 * 64 + t * 8);
#pragma unroll
        for (int n = 0; n < NB; n++) {
          const uint4 b = q_plain[(D / 32 * NB + n) * 32 + lane];
          mma(even[n], w.x, 0, w.y, 0, b.x, b.y);
        }
      }
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) mean[n][e] = (even[n][e] + odd[n][e + 2]) * (scale[n][e] * (1 / CODE));
    }

    float score[2][NB][4];  // [16 tokens][row tile]: tokens g and g + 8, rows 2t and 2t + 1
    uint2 ks[GROUPS];
#pragma unroll
    for (int k = 0; k < GROUPS; k++) ks[k] = *(const uint2*)(slice + K_SCALES + (g * GROUPS + k) * 8);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u8* codes = slice + K_CODES + j * 2 * K_BITS * D;
      u32 w[WORDS<K_BITS>];
      if (GROUP != 64) load_codes<K_BITS>(codes, lane, 0, STEPS, w);
#pragma unroll
      for (int k = 0; k < GROUPS; k++) {
        constexpr int AT_MOST = (GROUP + 15) / 16 + 1;
        const int first = k * GROUP / 16, last = ((k + 1) * GROUP + 15) / 16;
        if (GROUP == 64) load_codes<K_BITS>(codes, lane, first, last, w);
        float a[NB][4];
#pragma unroll
        for (int x = 0; x < AT_MOST; x++) {
          const int step = first + x;
          if (step >= last) break;
#pragma unroll
          for (int n = 0; n < NB; n++) {
            u32 b0, b1;
            query(step, n, k, b0, b1);
            if (x == 0) {
              const float4 y = starts[(k * NB + n) * 4 + t];
              mma_codes<K_BITS>(a[n], w, step, b0, b1, y.x, y.y, y.z, y.w);
            } else mma_codes<K_BITS>(a[n], w, step, b0, b1);
          }
        }
        const float2 e = unpack_half(j ? ks[k].y : ks[k].x);
        const float low = e.x, high = e.y * UPPER<K_BITS>;
#pragma unroll
        for (int n = 0; n < NB; n++) {
          const float d2 = upper<K_BITS>(a[n][0], a[n][2]), d3 = upper<K_BITS>(a[n][1], a[n][3]);
          if (k == 0) {
            score[j][n][0] = a[n][0] * low; score[j][n][1] = a[n][1] * low;
            score[j][n][2] = d2 * high; score[j][n][3] = d3 * high;
          } else {
            score[j][n][0] += a[n][0] * low; score[j][n][1] += a[n][1] * low;
            score[j][n][2] += d2 * high; score[j][n][3] += d3 * high;
          }
          if (AFFINE) {
            const uint2 biases = *(const uint2*)(slice + K_BIASES + (g * GROUPS + k) * 8);
            const float2 b = unpack_half(j ? biases.y : biases.x);
            const float4 y = starts[(k * NB + n) * 4 + t];
            const float more = b.x * (-1 / midrise(4)) - e.x, more8 = b.y * (-1 / midrise(4)) - e.y;  // of sum(q) * -7.5
            score[j][n][0] += y.x * more; score[j][n][1] += y.y * more;
            score[j][n][2] += y.x * more8; score[j][n][3] += y.y * more8;
          }
        }
      }
    }

    uint2 vs[2][GROUPS], vb[2][GROUPS];  // vb: where AFFINE, b + 7.5 s
    u32 top_scale = 0;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int k = 0; k < GROUPS; k++) {
        vs[j][k] = *(const uint2*)(slice + V_SCALES + ((j * 4 + t) * GROUPS + k) * 8);
        if (AFFINE) {
          constexpr u32 MIDRISE = 0x47804780u, MAGNITUDE = 0x7fff7fffu;  // 7.5 twice
          vb[j][k] = *(const uint2*)(slice + V_BIASES + ((j * 4 + t) * GROUPS + k) * 8);
          vb[j][k].x = fma_half2(vs[j][k].x, MIDRISE, vb[j][k].x);
          vb[j][k].y = fma_half2(vs[j][k].y, MIDRISE, vb[j][k].y);
          top_scale = max_half2(top_scale, max_half2(vb[j][k].x & MAGNITUDE, vb[j][k].y & MAGNITUDE));
          top_scale = max_half2(top_scale, max_half2(vs[j][k].x & MAGNITUDE, vs[j][k].y & MAGNITUDE));
        } else top_scale = max_half2(top_scale, max_half2(vs[j][k].x, vs[j][k].y));
      }
    float candidate[NB][2];
    const bool larger = max_half2(top_scale, largest) != largest;
    bool rescale = larger;
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float x = fmaxf(fmaxf(score[0][n][e], score[0][n][e + 2]), fmaxf(score[1][n][e], score[1][n][e + 2]));
        candidate[n][e] = fmaf(x, scale[n][e], mean[n][e]);
        rescale |= candidate[n][e] > m[n][e] + SLACK;
      }
    if (__any_sync(~0u, rescale)) {
      float was = bias;
      if (__any_sync(~0u, larger)) {
        const float2 e = unpack_half(top_scale);
        choose_bias(warp_max(fmaxf(e.x, e.y)), bias, largest);
      }
#pragma unroll
      for (int n = 0; n < NB; n++) {
        float al[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float x = candidate[n][e];
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
          x = fmaxf(x, m[n][e]);
          al[e] = ex2((m[n][e] - x) + (bias - was));
          m[n][e] = x;
          l[n][e] *= al[e];
#pragma unroll
          for (int k = 0; k < GROUPS; k++) weighted[k][n][e] *= al[e];
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) { o[i][n][0] *= al[0]; o[i][n][1] *= al[1]; o[i][n][2] *= al[0]; o[i][n][3] *= al[1]; }
      }
    }

    // P, moved from (row = token) to (row = query) order, times the value scale of each group
    constexpr u32 ONES = 0x3c003c00u, OFFSET = V_BITS == 4 ? 0xc780c780u : 0xd7f8d7f8u;  // 1; -7.5 or -127.5
    u32 p[2][NB][GROUPS][2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int n = 0; n < NB; n++) {
        const float f0 = mean[n][0] - m[n][0] + bias, f1 = mean[n][1] - m[n][1] + bias;
        const float p0 = ex2(fmaf(score[j][n][0], scale[n][0], f0)), p1 = ex2(fmaf(score[j][n][1], scale[n][1], f1));
        const float p2 = ex2(fmaf(score[j][n][2], scale[n][0], f0)), p3 = ex2(fmaf(score[j][n][3], scale[n][1], f1));
        l[n][0] += p0 + p2;
        l[n][1] += p1 + p3;
        const u32 x0 = transpose8x8(pack_half(p0, p1)), x1 = transpose8x8(pack_half(p2, p3));
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          p[j][n][k][0] = mul_half2(x0, vs[j][k].x);
          p[j][n][k][1] = mul_half2(x1, vs[j][k].y);
          if (AFFINE) {
            float d[4];
            mma(d, ONES, ONES, ONES, ONES, mul_half2(x0, vb[j][k].x), mul_half2(x1, vb[j][k].y), 0, 0, 0, 0);
            weighted[k][n][0] += d[0];
            weighted[k][n][1] += d[1];
          }
        }
      }
#pragma unroll
    for (int n = 0; n < NB; n++)  // sums of P * scale times what a code is off by
#pragma unroll
      for (int k = 0; k < GROUPS; k++) {
        float d[4];
        mma(d, OFFSET, OFFSET, OFFSET, OFFSET, p[0][n][k][0], p[0][n][k][1], 0, 0, 0, 0);
        mma(d, OFFSET, OFFSET, OFFSET, OFFSET, p[1][n][k][0], p[1][n][k][1]);
        weighted[k][n][0] += d[0];
        weighted[k][n][1] += d[1];
      }
#pragma unroll
    for (int quad = 0; quad < STEPS; quad += 4) {
      u32 x[WORDS<V_BITS>], y[WORDS<V_BITS>];
      load_codes<V_BITS>(slice + V_CODES, lane, quad, quad + 4, x);
      load_codes<V_BITS>(slice + V_CODES + 2 * V_BITS * D, lane, quad, quad + 4, y);
#pragma unroll
      for (int i = quad; i < quad + 4; i++) {
        if (i >= STEPS) break;
        const int low = 16 * i / GROUP, high = (16 * i + 8) / GROUP;
#pragma unroll
        for (int n = 0; n < NB; n++) {
          float d[4];
          mma_codes<V_BITS>(d, x, i, p[0][n][low][0], p[0][n][low][1], 0, 0, 0, 0);
          mma_codes<V_BITS>(d, y, i, p[1][n][low][0], p[1][n][low][1]);
          if (low != high) {  // channels 16i + 8.. belong to the next scale
            float z[4];
            mma_codes<V_BITS>(z, x, i, p[0][n][high][0], p[0][n][high][1], 0, 0, 0, 0);
            mma_codes<V_BITS>(z, y, i, p[1][n][high][0], p[1][n][high][1]);
            d[2] = V_BITS == 4 ? z[2] - z[0] + d[0] : z[2];
            d[3] = V_BITS == 4 ? z[3] - z[1] + d[1] : z[3];
          }
#pragma unroll
          for (int e = 0; e < 4; e++) o[i][n][e] += d[e];
        }
      }
    }
    __syncwarp();
    if (++stage == NS) { stage = 0; phase ^= 1; }
  }
  if (!BULK) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();

  float* own_o = po + ((i64)h * all.partials() + cta) * partial;
  float* own_l = pl + ((i64)h * all.partials() + cta) * rows;
  // Merge the CTA's warps, 8 rows at a time: each puts its o into its own ring.
  float* own = (float*)ring.stages;
#pragma unroll
  for (int n = 0; n < NB; n++) {
    if (n) __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = l[n][e];
      x += __shfl_xor_sync(~0u, x, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      x += __shfl_xor_sync(~0u, x, 16);
      if (g == 0) ml[warp * 8 + 2 * t + e] = make_float2(m[n][e] - bias, x);
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const float low = o[i][n][e], high = upper<V_BITS>(low, o[i][n][e + 2]);
        float* at = own + (2 * t + e) * O_PITCH + 16 * i + g;
        at[0] = low * CODE + weighted[16 * i / GROUP][n][e];
        at[8] = high * (CODE * UPPER<V_BITS>) + weighted[(16 * i + 8) / GROUP][n][e];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < 8 * D / 4; x += NW * 32) {
      const int r = x / (D / 4), c4 = x % (D / 4) * 4, row = r0 + 8 * n + r;
      if (row >= rows) break;
      float2 each[NW];
      float top = NONE, sum = 0;
#pragma unroll
      for (int w = 0; w < NW; w++) { each[w] = ml[w * 8 + r]; top = fmaxf(top, each[w].x); }
      float4 a = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < NW; w++) {
        const float f = ex2(each[w].x - top);
        sum += f * each[w].y;
        const float4 y = *(const float4*)((const float*)(smem + w * NS * STAGE) + r * O_PITCH + c4);
        a.x += f * y.x; a.y += f * y.y; a.z += f * y.z; a.w += f * y.w;
      }
      const float inverse = sum > 0 ? __fdividef(1.f, sum) : 0.f;
      *(float4*)(own_o + (i64)row * D + c4) = make_float4(a.x * inverse, a.y * inverse, a.z * inverse, a.w * inverse);
      if (c4 == 0) own_l[row] = top + lg2(sum);
    }
  }
  done(h, r0);
}

}  // namespace longleaf
