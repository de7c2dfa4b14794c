  // Body of `decode`. tiles (num_blocks, num_kv_heads, words) -> k, v (num_kv_heads, tokens, D) T.
  // Grid of threadgroups: block, KV head, keys or values.
  constexpr int TOKENS = Slice<D>::TOKENS, WORDS = Tile<D>::WORDS;
  threadgroup float x[TOKENS * D];

  const int thread_index = thread_index_in_threadgroup, num_threads = threads_per_threadgroup.x;
  const int block = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const bool values = threadgroup_position_in_grid.z;
  const int num_blocks = threadgroups_per_grid.x;
  const device uint* tile = tiles + (size_t(block) * threadgroups_per_grid.y + head) * Tile<D>::SIZE;
  const device uint* codes = tile + (values ? Tile<D>::V_CODES : 0);
  const device half* scales = (const device half*)(tile + (values ? Tile<D>::V_SCALES : Tile<D>::K_SCALES));
  const device half* mean = (const device half*)(tile + Tile<D>::K_MEAN);
  device T* out = (values ? v : k) + (size_t(head) * num_blocks + block) * BLOCK_TOKENS * D;

  for (int from = 0; from < BLOCK_TOKENS; from += TOKENS) {
    for (int i = thread_index; i < TOKENS * WORDS; i += num_threads) {
      const int token = from + i / WORDS, word = i % WORDS;
      float2 pairs[4];
      const half scale = scales[token * Tile<D>::GROUPS + word / Tile<D>::GROUP_WORDS];
      dequantize(codes[token * WORDS + word], scale_of(scale), pairs);
      for (int p = 0; p < 4; p++) {
        x[i * 8 + p] = pairs[p].x;
        x[i * 8 + p + 4] = pairs[p].y;
      }
    }
    hadamard<D, TOKENS, Natural<D>>(x, rotation + 48, thread_index, num_threads);
    for (int i = thread_index; i < TOKENS * D; i += num_threads) {
      const int channel = i % D;
      const float number = signed_channel(x[i] * norm<D>(), rotation, channel);
      out[from * D + i] = T(values ? number : number + float(mean[channel]));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
