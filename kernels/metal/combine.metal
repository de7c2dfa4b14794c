  // Body of `combine`. A threadgroup owns one query row, a thread one channel: it weighs the splits by their lse,
  // rotates back what came from blocks, and divides by all weights, those of the sink logits included. float32.
  // partial (rows, splits, D), lse (rows, splits), logits (num_q_heads,); the rest as in `split`.
  // -> out (rows, D) T. A device whose simdgroups are not 32 wide gets NaN.
  threadgroup float blocks[D];
  const int row = threadgroup_position_in_grid.x, channel = thread_position_in_threadgroup.x;
  const int num_threads = threads_per_threadgroup.x;
  const int num_splits = sizes[1] + sizes[3] + sizes[5];
  const size_t first = size_t(row) * num_splits;  // lse by index: MLX makes a constant of it below 8 elements
  const device float* numbers = partial + size_t(row) * num_splits * D + channel;
  const float logit = sizes[8] ? float(logits[row / sizes[9] % sizes[10]]) * M_LOG2E_F : -INFINITY;

  float top = logit;
  for (int n = 0; n < num_splits; n++) {
    top = max(top, lse[first + n]);
  }
  float total = logit == -INFINITY ? 0.0f : fast::exp2(logit - top);
  float rotated = 0, dense = 0;
  for (int n = 0; n < num_splits; n++) {
    const float weight = lse[first + n] == -INFINITY ? 0.0f : fast::exp2(lse[first + n] - top);
    const float x = channel < D ? weight * numbers[n * D] : 0.0f;
    total += weight;
    rotated += n < sizes[1] ? x : 0.0f;
    dense += n < sizes[1] ? 0.0f : x;
  }
  if (channel < D) {
    blocks[channel] = rotated;
  }
  hadamard<D, 1, Natural<D>>(blocks, rotation + 48, channel, num_threads);
  if (channel < D) {
    const float x = (signed_channel(blocks[channel], rotation, channel) + dense) / total;
    out[size_t(row) * D + channel] = T(threads_per_simdgroup == 32 ? x : NAN);
  }
