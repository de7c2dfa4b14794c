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

// Loops over what a lane keeps in registers: an array that is indexed in a real loop lives in memory.
#define UNROLL _Pragma("clang loop unroll(full)")

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

// An order of `rows` x D numbers in threadgroup memory: at(row, channel), and whether rows stand side by side.
template <int D>
struct Natural {
  static constexpr constant bool ROWS_TOGETHER = false;
  static int at(int row, int channel) { return row * D + channel; }
};

// log2(RADIX) steps of the fast transform in registers, from distance h.
template <int D, int ROWS, int RADIX, typename Order>
void butterflies(threadgroup float* x, int h, int thread_index, int num_threads) {
  constexpr int GROUPS = D / RADIX;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < ROWS * GROUPS; i += num_threads) {
    const int row = Order::ROWS_TOGETHER ? i % ROWS : i / GROUPS;
    const int group = Order::ROWS_TOGETHER ? i / ROWS : i % GROUPS;
    const int low = group & (h - 1), first = (group - low) * RADIX + low;
    float y[RADIX];
    UNROLL
    for (int e = 0; e < RADIX; e++) {
      y[e] = x[Order::at(row, first + e * h)];
    }
    UNROLL
    for (int b = 1; b < RADIX; b *= 2) {
      UNROLL
      for (int e = 0; e < RADIX; e++) {
        if ((e & b) == 0) {
          const float u = y[e], v = y[e + b];
          y[e] = u + v;
          y[e + b] = u - v;
        }
      }
    }
    UNROLL
    for (int e = 0; e < RADIX; e++) {
      x[Order::at(row, first + e * h)] = y[e];
    }
  }
}

// rows <- rows H, in place; with the rows of H_m for its columns, rows <- rows H^T. Not divided by sqrt(D).
// Begins and ends with a barrier.
template <int D, int ROWS, typename Order>
void hadamard(threadgroup float* x, const device uint* columns, int thread_index, int num_threads) {
  constexpr int M = Hadamard<D>::M, K = Hadamard<D>::K;
  int h = 1;
  for (; h * 8 <= K; h *= 8) {
    butterflies<D, ROWS, 8, Order>(x, h, thread_index, num_threads);
  }
  if (h * 4 == K) {
    butterflies<D, ROWS, 4, Order>(x, h, thread_index, num_threads);
  } else if (h * 2 == K) {
    butterflies<D, ROWS, 2, Order>(x, h, thread_index, num_threads);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (M == 1) {
    return;
  }
  for (int i = thread_index; i < ROWS * K; i += num_threads) {
    const int row = Order::ROWS_TOGETHER ? i % ROWS : i / K, k = Order::ROWS_TOGETHER ? i / ROWS : i % K;
    float in[M];
    for (int m = 0; m < M; m++) {
      in[m] = x[Order::at(row, m * K + k)];
    }
    for (int m = 0; m < M; m++) {
      const uint signs = columns[m];
      float sum = 0;
      for (int j = 0; j < M; j++) {
        sum += flip(in[j], signs, j);
      }
      x[Order::at(row, m * K + k)] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <int D>
float norm() { return 1.0f / precise::sqrt(float(D)); }
