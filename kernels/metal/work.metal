// What one threadgroup of the split kernel owns: a KV head, a range of one part of the cache, some query rows.
//
// `sizes` (int32, so that no length is compiled in):
//   0 num_blocks  1 block_splits  2 num_sinks  3 sink_splits  4 num_tail  5 tail_splits  6 window (0: none)
//   7 has tail_lengths  8 has sink logits  9 num_queries  10 num_q_heads  11 splits in the rotated basis
// The query rows of a KV head, over all B rows of the batch, are numbered i = (b * group + g) * Sq + s. All of
// them read the sinks and the blocks; those of one b read its tail.
// Threadgroups of grid x: (sinks and blocks) splits * row tiles, then B * tail splits * row tiles; y: KV heads.
#include <metal_stdlib>
using namespace metal;

enum class Part { blocks, sinks, tail };

struct Work {
  Part part;
  int split;       // of the row's partials
  int row0;        // first of this tile's query rows
  int num_rows;    // how many of the tile are there
  int batch;       // whose tail
  int first, last; // range: blocks, or tokens of a dense part
  int head, num_heads, rows_per_batch, num_queries, num_splits, tail_length, window;

  // The tile's n-th row: its number among all B * num_q_heads * Sq, and the tail tokens up to its own. Rows that
  // aren't there stand for the first, and are never written.
  int2 row(int n) const thread {
    const int i = row0 + (n < num_rows ? n : 0);
    const int number = (i / rows_per_batch * num_heads + head) * rows_per_batch + i % rows_per_batch;
    return int2(number, tail_length - num_queries + i % num_queries + 1);
  }
  // A row sees the tokens [low, high) of this range of a dense part.
  int low(int2 row) const thread {
    return part == Part::tail && window > 0 ? max(first, row.y - window) : first;
  }
  int high(int2 row) const thread {
    return part == Part::tail ? min(last, row.y) : last;
  }
};

template <int ROWS, typename Lengths>
Work find_work(const device int* sizes, Lengths tail_lengths, int batch, int q_heads, int kv_heads,
               int num_queries, int x, int head) {
  Work w;
  w.head = head;
  w.num_heads = kv_heads;
  w.num_queries = num_queries;
  w.rows_per_batch = q_heads / kv_heads * num_queries;
  w.window = sizes[6];
  const int num_rows = batch * w.rows_per_batch;
  const int shared_splits = sizes[1] + sizes[3];
  const int shared_tiles = (num_rows + ROWS - 1) / ROWS;
  const int tail_tiles = (w.rows_per_batch + ROWS - 1) / ROWS;
  w.num_splits = shared_splits + sizes[5];
  w.tail_length = 0;
  w.batch = 0;
  int row_end, part_splits, count, index;
  if (x < shared_splits * shared_tiles) {
    w.split = x / shared_tiles;
    w.row0 = x % shared_tiles * ROWS;
    row_end = num_rows;
    w.part = w.split < sizes[1] ? Part::blocks : Part::sinks;
    part_splits = w.part == Part::blocks ? sizes[1] : sizes[3];
    count = w.part == Part::blocks ? sizes[0] : sizes[2];
    index = w.part == Part::blocks ? w.split : w.split - sizes[1];
  } else {
    x -= shared_splits * shared_tiles;
    w.part = Part::tail;
    w.batch = x / (tail_tiles * sizes[5]);
    index = x / tail_tiles % sizes[5];
    w.split = shared_splits + index;
    w.row0 = w.batch * w.rows_per_batch + x % tail_tiles * ROWS;
    row_end = (w.batch + 1) * w.rows_per_batch;
    w.tail_length = sizes[7] ? tail_lengths[w.batch] : sizes[4];
    part_splits = sizes[5];
    count = sizes[4];
  }
  w.num_rows = min(ROWS, row_end - w.row0);
  const int chunk = (count + part_splits - 1) / part_splits;
  w.first = min(count, index * chunk);
  w.last = min(count, w.first + chunk);
  if (w.part == Part::tail) {  // what no query sees may hold anything: never read it
    const int oldest = w.window > 0 ? max(0, w.tail_length - num_queries + 1 - w.window) : 0;
    w.first = max(w.first, oldest);
    w.last = min(w.last, w.tail_length);
  }
  return w;
}
