  // Body of `combine`. A threadgroup owns one query row, a thread one channel: it weighs the splits by their lse,
  // rotates back what came from rotated blocks, and divides by all weights, those of the sink logits included. float32.
  // partial (rows, splits, D), lse (rows, splits), logits (num_q_heads,); the rest as in `split`.
  // -> out (rows, D) T. A device whose simdgroups are not 32 wide gets NaN.
  threadgroup float blocks[D];
  threadgroup float weights[MAX_SPLITS];
  threadgroup float tops[16], totals[16];  // of the simdgroups
  const int row = threadgroup_position_in_grid.x, channel = thread_position_in_threadgroup.x;
  const int num_threads = threads_per_threadgroup.x, simdgroup = simdgroup_index_in_threadgroup;
  const int num_rotated = sizes[11], num_splits = sizes[1] + sizes[3] + sizes[5];
  const size_t first = size_t(row) * num_splits;  // lse by index: MLX makes a constant of it below 8 elements
  const float logit = sizes[8] ? float(logits[row / sizes[9] % sizes[10]]) * M_LOG2E_F : -INFINITY;

  float top = logit;
  for (int n = channel; n < num_splits; n += num_threads) {
    top = max(top, lse[first + n]);
  }
  top = simd_max(top);
  if (thread_index_in_simdgroup == 0) {
    tops[simdgroup] = top;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = 0; n < num_threads / 32; n++) {
    top = max(top, tops[n]);
  }
  float total = 0;
  for (int n = channel; n < num_splits; n += num_threads) {
    weights[n] = lse[first + n] == -INFINITY ? 0.0f : fast::exp2(lse[first + n] - top);
    total += weights[n];
  }
  total = simd_sum(total);
  if (thread_index_in_simdgroup == 0) {
    totals[simdgroup] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  total = logit == -INFINITY ? 0.0f : fast::exp2(logit - top);
  for (int n = 0; n < num_threads / 32; n++) {
    total += totals[n];
  }

  float rotated = 0, dense = 0;
  if (channel < D) {
    const device float* numbers = partial + first * D + channel;
    for (int n = 0; n < num_rotated; n++) {
      rotated = fma(weights[n], numbers[n * D], rotated);
    }
    for (int n = num_rotated; n < num_splits; n++) {
      dense = fma(weights[n], numbers[n * D], dense);
    }
    blocks[channel] = rotated * norm<D>();
  }
  hadamard<D, 1, Natural<D>>(blocks, rotation + 48, channel, num_threads);
  if (channel < D) {
    const float x = (signed_channel(blocks[channel], rotation, channel) + dense) / total;
    out[size_t(row) * D + channel] = T(threads_per_simdgroup == 32 ? x : NAN);
  }
