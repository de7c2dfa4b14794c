  // Body of `encode`. k, v (num_kv_heads, tokens, D) -> tiles (num_blocks, num_kv_heads, words).
  // Grid of threadgroups: block, KV head, keys or values.
  using Layout = Tile<D, K_BITS, V_BITS, AFFINE>;
  constexpr int TOKENS = Slice<D>::TOKENS, SCALES = TOKENS * Layout::GROUPS;
  threadgroup float x[TOKENS * D];
  threadgroup float mean[D];
  threadgroup half scales[SCALES], biases[SCALES];

  const int thread_index = thread_index_in_threadgroup, num_threads = threads_per_threadgroup.x;
  const int block = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const bool values = threadgroup_position_in_grid.z;
  const size_t first = (size_t(head) * k_shape[1] + size_t(block) * BLOCK_TOKENS) * D;
  device uint* tile = tiles + (size_t(block) * k_shape[0] + head) * Layout::SIZE;
  device uint* tile_scales = tile + (values ? Layout::V_SCALES : Layout::K_SCALES);
  const bool centred = Layout::ROTATED && !values;

  for (int channel = thread_index; channel < D; channel += num_threads) {
    float sum = 0;
    for (int t = 0; t < BLOCK_TOKENS && centred; t++) {
      sum += float(k[first + t * D + channel]);
    }
    mean[channel] = float(half(clamp(sum / BLOCK_TOKENS, -HALF_LARGEST, HALF_LARGEST)));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < D / 2 && centred; i += num_threads) {
    tile[Layout::K_MEAN + i] = as_type<uint>(half2(half(mean[2 * i]), half(mean[2 * i + 1])));
  }

  for (int from = 0; from < BLOCK_TOKENS; from += TOKENS) {
    for (int i = thread_index; i < TOKENS * D; i += num_threads) {
      const size_t at = first + from * D + i;
      const float number = values ? float(v[at]) : float(k[at]) - mean[i % D];
      x[i] = Layout::ROTATED ? signed_channel(number * norm<D>(), rotation, i % D) : number;
    }
    if (Layout::ROTATED) {
      hadamard<D, TOKENS, Natural<D>>(x, rotation + 16, thread_index, num_threads);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (values) {
      write_codes<Layout, typename Layout::V>(x, from, tile + Layout::V_CODES, scales, biases, thread_index,
                                              num_threads);
    } else {
      write_codes<Layout, typename Layout::K>(x, from, tile, scales, biases, thread_index, num_threads);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < SCALES / 2; i += num_threads) {
      device uint* to = tile_scales + from * Layout::GROUPS / 2 + i;
      to[0] = as_type<uint>(half2(scales[2 * i], scales[2 * i + 1]));
      if (!Layout::ROTATED) {
        to[Layout::SCALES] = as_type<uint>(half2(biases[2 * i], biases[2 * i + 1]));
      }
    }
  }
