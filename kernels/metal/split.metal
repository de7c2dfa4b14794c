  // Body of `split`; MLX writes the signature. q (B, num_q_heads, Sq, D) T; tiles (capacity, num_kv_heads, words);
  // sinks (num_kv_heads, n, D), tails (B, num_kv_heads, n, D) of C; see work.metal for sizes and the grid.
  // -> partial (rows, splits, D) float32, divided by its weights' sum; lse (rows, splits), in base 2.
  // Blocks leave their partials in the basis of their codes.
  constexpr int SIMDGROUPS = 4;
  using Layout = Tile<D, K_BITS, V_BITS, AFFINE>;
  using Vector = VectorSplit<T, C, Layout, ROWS, SIMDGROUPS>;
  using Matrix = MatrixSplit<T, C, Layout, ROWS, SIMDGROUPS>;
  using Split = conditional_t<(ROWS < 8), Vector, Matrix>;
  threadgroup float numbers[Split::SCRATCH];  // queries, then the rows' output
  threadgroup float stats[2 * Split::STATS];
  threadgroup float sums[ROWS];
  threadgroup int2 rows[ROWS];

  const int thread_index = thread_index_in_threadgroup, num_threads = 32 * SIMDGROUPS;
  const int head = threadgroup_position_in_grid.y, num_heads = threadgroups_per_grid.y;
  const Work work = find_work<ROWS>(sizes, tail_lengths, q_shape[0], q_shape[1], num_heads, q_shape[2],
                                    threadgroup_position_in_grid.x, head);
  const float factor = scale * M_LOG2E_F;
  const bool rotated = Layout::ROTATED && work.part == Part::blocks;
  if (thread_index < ROWS) {
    rows[thread_index] = work.row(thread_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const float rotated_factor = factor * norm<D>();
  for (int channel = thread_index; channel < Split::CHANNELS; channel += num_threads) {
    const bool there = channel < D;
    const float y = !rotated ? factor : there ? signed_channel(rotated_factor, rotation, channel) : 0.0f;
    for (int row = 0; row < ROWS; row++) {
      const float x = there && row < work.num_rows ? float(q[rows[row].x * D + channel]) : 0.0f;
      numbers[Split::at(row, channel)] = x * y;
    }
  }
  if (rotated) {
    hadamard<D, ROWS, Split>(numbers, rotation + 16, thread_index, num_threads);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  Split split;
  split.begin(work, rows, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
  split.set_queries(numbers);
  if (work.part == Part::blocks) {
    const size_t stride = size_t(num_heads) * Layout::SIZE;
    split.blocks(tiles + head * Layout::SIZE, stride, work.first, work.last, q, factor);
  } else if (work.part == Part::sinks) {
    const size_t at = size_t(head) * sizes[2] * D;
    split.dense(sinks_k + at, sinks_v + at, work.first, work.last);
  } else {
    const size_t at = (size_t(work.batch) * num_heads + head) * sizes[4] * D;
    split.dense(tail_k + at, tail_v + at, work.first, work.last);
  }
  split.merge(numbers, stats);

  if (thread_index < ROWS) {
    float top = -INFINITY, sum = 0;
    for (int n = 0; n < Split::STREAMS; n++) {
      top = max(top, stats[Split::stat(thread_index, n)]);
    }
    for (int n = 0; n < Split::STREAMS; n++) {
      const int i = Split::stat(thread_index, n);
      sum += stats[i] == -INFINITY ? 0.0f : stats[Split::STATS + i] * fast::exp2(stats[i] - top);
    }
    sums[thread_index] = sum == 0 ? 0.0f : 1.0f / sum;
    if (thread_index < work.num_rows) {
      const size_t at = size_t(rows[thread_index].x) * work.num_splits + work.split;
      lse[at] = sum == 0 ? -INFINITY : top + fast::log2(sum);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int row = 0; row < work.num_rows; row++) {
    const size_t at = (size_t(rows[row].x) * work.num_splits + work.split) * D;
    for (int channel = thread_index; channel < D; channel += num_threads) {
      partial[at + channel] = numbers[row * D + channel] * sums[row];
    }
  }
