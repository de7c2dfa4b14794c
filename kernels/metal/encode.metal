  // Body of `encode`. k, v (num_kv_heads, tokens, D) -> tiles (num_blocks, num_kv_heads, words).
  // Grid of threadgroups: block, KV head, keys or values.
  constexpr int TOKENS = Slice<D>::TOKENS, WORDS = Tile<D>::WORDS;
  constexpr int GROUPS = Tile<D>::GROUPS, GROUP_WORDS = Tile<D>::GROUP_WORDS;
  threadgroup float x[TOKENS * D];
  threadgroup float mean[D];
  threadgroup half scales[TOKENS * GROUPS];

  const int thread_index = thread_index_in_threadgroup, num_threads = threads_per_threadgroup.x;
  const int block = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const bool values = threadgroup_position_in_grid.z;
  const size_t first = (size_t(head) * k_shape[1] + size_t(block) * BLOCK_TOKENS) * D;
  device uint* tile = tiles + (size_t(block) * k_shape[0] + head) * Tile<D>::SIZE;
  device uint* codes = tile + (values ? Tile<D>::V_CODES : 0);
  device uint* tile_scales = tile + (values ? Tile<D>::V_SCALES : Tile<D>::K_SCALES);

  for (int channel = thread_index; channel < D; channel += num_threads) {
    float sum = 0;
    for (int t = 0; t < BLOCK_TOKENS && !values; t++) {
      sum += float(k[first + t * D + channel]);
    }
    mean[channel] = float(half(clamp(sum / BLOCK_TOKENS, -HALF_LARGEST, HALF_LARGEST)));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < D / 2 && !values; i += num_threads) {
    tile[Tile<D>::K_MEAN + i] = as_type<uint>(half2(half(mean[2 * i]), half(mean[2 * i + 1])));
  }

  for (int from = 0; from < BLOCK_TOKENS; from += TOKENS) {
    for (int i = thread_index; i < TOKENS * D; i += num_threads) {
      const size_t at = first + from * D + i;
      const float number = values ? float(v[at]) : float(k[at]) - mean[i % D];
      x[i] = signed_channel(number * norm<D>(), rotation, i % D);
    }
    hadamard<D, TOKENS, Natural<D>>(x, rotation + 16, thread_index, num_threads);
    for (int base = 0; base < TOKENS * GROUPS; base += num_threads / 8) {
      const int item = min(base + thread_index / 8, TOKENS * GROUPS - 1), word = thread_index % 8;
      const int token = item / GROUPS, at = item % GROUPS * GROUP_WORDS + word;
      const bool there = word < GROUP_WORDS;
      float numbers[8];
      for (int i = 0; i < 8; i++) {
        numbers[i] = there ? x[token * D + 8 * at + i] : 0.0f;
      }
      const float scale = search_scale(numbers, there, 8 * GROUP_WORDS);
      const float inverse = 1.0f / max(scale, 1e-30f);
      uint packed = 0;
      for (int i = 0; i < 8; i++) {
        packed |= uint(code_of(numbers[i], inverse)) << (4 * i);
      }
      if (there && base + thread_index / 8 == item) {
        codes[(from + token) * WORDS + at] = packed;
        if (word == 0) {
          scales[item] = half(scale);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < TOKENS * GROUPS / 2; i += num_threads) {
      tile_scales[from * GROUPS / 2 + i] = as_type<uint>(half2(scales[2 * i], scales[2 * i + 1]));
    }
  }
