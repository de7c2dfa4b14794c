// The rotation of the int4c format, in threadgroup memory: x' = x diag(signs) H / sqrt(D).
//
// H is the Hadamard matrix of mx.hadamard_transform: H = H_m (x) H_k, D = m k, k the largest power of two
// that leaves m = 1, 12, 20 or 28. `table` holds its signs, a set bit meaning -1:
//
//   | words   | meaning                                                                |
//   |---------|------------------------------------------------------------------------|
//   | 0..15   | signs of the D channels, channel 0 in the lowest bit of word 0           |
//   | 16..47  | column i of H_m, row 0 in the lowest bit                                 |
//   | 48..79  | row i of H_m, column 0 in the lowest bit                                 |
//
// Every thread of the threadgroup takes part in every call; float32 throughout.
#include <metal_stdlib>
using namespace metal;

constexpr bool power_of_two(int n) { return (n & (n - 1)) == 0; }

template <int D>
struct Hadamard {
  static constexpr constant int M = power_of_two(D)                       ? 1
      : (D % 12 == 0 && power_of_two(D / 12)) ? 12
      : (D % 20 == 0 && power_of_two(D / 20)) ? 20
                                              : 28;
  static constexpr constant int K = D / M;
  static_assert(D % M == 0 && power_of_two(D / M), "no Hadamard matrix for this head size");
};

inline float flip(float x, uint word, int bit) {
  return as_type<float>(as_type<uint>(x) ^ ((word >> bit) << 31));
}

inline float signed_channel(float x, const device uint* table, int channel) {
  return flip(x, table[channel / 32], channel % 32);
}

// rows <- rows H (or H^T) / sqrt(D), in place. Order::at(row, channel) is where an element stands.
// Begins and ends with a barrier.
template <int D, int ROWS, typename Order>
void hadamard(threadgroup float* x, const device uint* columns, int thread_index, int num_threads) {
  constexpr int M = Hadamard<D>::M, K = Hadamard<D>::K;
  for (int h = 1; h < K; h *= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < ROWS * D / 2; i += num_threads) {
      const int row = i % ROWS, pair = i / ROWS, channel = pair / h * 2 * h + pair % h;
      threadgroup float* a = x + Order::at(row, channel);
      threadgroup float* b = x + Order::at(row, channel + h);
      const float u = *a, v = *b;
      *a = u + v;
      *b = u - v;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float norm = 1.0f / precise::sqrt(float(D));
  for (int i = thread_index; i < ROWS * K; i += num_threads) {
    const int row = i % ROWS, k = i / ROWS;
    float in[M];
    for (int m = 0; m < M; m++) {
      in[m] = x[Order::at(row, m * K + k)];
    }
    for (int m = 0; m < M; m++) {
      float sum = in[0];
      if (M > 1) {
        const uint signs = columns[m];
        sum = 0;
        for (int j = 0; j < M; j++) {
          sum += flip(in[j], signs, j);
        }
      }
      x[Order::at(row, m * K + k)] = sum * norm;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Rows of D numbers one after another.
template <int D>
struct Natural {
  static int at(int row, int channel) { return row * D + channel; }
};
