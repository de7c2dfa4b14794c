  // Body of `decode`. tiles (num_blocks, num_kv_heads, words) -> k, v (num_kv_heads, tokens, D) T.
  // Grid of threadgroups: block, KV head, keys or values.
  using Layout = Tile<D, K_BITS, V_BITS, AFFINE>;
  constexpr int TOKENS = Slice<D>::TOKENS;
  threadgroup float x[TOKENS * D];

  const int thread_index = thread_index_in_threadgroup, num_threads = threads_per_threadgroup.x;
  const int block = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const bool values = threadgroup_position_in_grid.z;
  const int num_blocks = threadgroups_per_grid.x;
  const device uint* tile = tiles + (size_t(block) * threadgroups_per_grid.y + head) * Layout::SIZE;
  const device half* mean = (const device half*)(tile + Layout::K_MEAN);
  device T* out = (values ? v : k) + (size_t(head) * num_blocks + block) * BLOCK_TOKENS * D;

  for (int from = 0; from < BLOCK_TOKENS; from += TOKENS) {
    if (values) {
      read_slice<Layout, typename Layout::V>(tile + Layout::V_CODES, from, x, thread_index, num_threads);
    } else {
      read_slice<Layout, typename Layout::K>(tile, from, x, thread_index, num_threads);
    }
    if (Layout::ROTATED) {
      hadamard<D, TOKENS, Natural<D>>(x, rotation + 48, thread_index, num_threads);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int i = thread_index; i < TOKENS * D; i += num_threads) {
      const int channel = i % D;
      float number = x[i];
      if (Layout::ROTATED) {
        number = signed_channel(number * norm<D>(), rotation, channel);
        number = values ? number : number + float(mean[channel]);
      }
      out[from * D + i] = T(number);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
