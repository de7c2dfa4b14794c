// The library's entry points: which instruction set, how a call is cut, which threads do it.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "job.h"

using namespace longleaf;

namespace {

#if defined(__x86_64__)
// Whether the processor has it and the operating system saves its registers.
bool has_avx2() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return false;
  unsigned saved, high;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  return (saved & 0x6) == 0x6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

bool has_avx512() {
  unsigned a, b, c, d;
  if (!has_avx2()) return false;
  unsigned saved, high;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return (saved & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & needed) == needed;
}
#endif

const InstructionSet* find(const char* name) {
  const InstructionSet* have[3];
  int count = 0;
#if defined(__x86_64__)
  if (has_avx512()) have[count++] = &avx512;
  if (has_avx2()) have[count++] = &avx2;
#endif
  have[count++] = &baseline;
  for (int i = 0; i < count; ++i)
    if (!*name || !strcmp(name, have[i]->name)) return have[i];
  return nullptr;
}

// ---- threads that stay: one job at a time, its items taken one by one ----

struct Job {
  void (*run)(const void* what, int item, float* scratch);
  const void* what;
  int items;
  int64_t scratch;  // floats per thread
  int next;
};

// Grown and kept, so that a call asks the system for no memory.
struct Buffer {
  void* data;
  size_t bytes;
  void* reserve(size_t n) {
    if (n > bytes) {
      free(data);
      data = nullptr;
      bytes = posix_memalign(&data, 64, n) == 0 ? n : 0;
    }
    return data;
  }
};

struct Pool {
  pthread_mutex_t call = PTHREAD_MUTEX_INITIALIZER;  // one caller at a time
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
  Job* job = nullptr;     // open for helpers; guarded by lock, as are the counts
  int wanted = 0;         // helpers that may still join it
  int working = 0;        // helpers inside it
  int helpers = 0;        // threads there are
  bool failed = false;    // memory ran out
  Buffer scratch = {}, partials = {};
  pid_t process = 0;
};
Pool* pool = nullptr;
pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

// False if there is no memory for this thread's scratch; items already taken are always done.
bool work(Job* job, Buffer& buffer) {
  float* scratch = (float*)buffer.reserve(sizeof(float) * job->scratch);
  if (!scratch) return false;
  for (int i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->items;)
    job->run(job->what, i, scratch);
  return true;
}

void* help(void* argument) {
  Pool& p = *(Pool*)argument;
  Buffer buffer = {};
  pthread_mutex_lock(&p.lock);
  for (;;) {
    while (!p.job || p.wanted == 0) pthread_cond_wait(&p.wake, &p.lock);
    Job* job = p.job;
    --p.wanted;
    ++p.working;
    pthread_mutex_unlock(&p.lock);
    work(job, buffer);  // without memory the caller does it all
    pthread_mutex_lock(&p.lock);
    if (--p.working == 0) pthread_cond_signal(&p.idle);
  }
  return nullptr;
}

// A forked child has the memory of the pool but none of its threads: it gets a pool of its own.
Pool* current() {
  pthread_mutex_lock(&pool_lock);
  if (!pool || pool->process != getpid()) {
    pool = (Pool*)malloc(sizeof(Pool));
    if (pool) {
      static const Pool fresh = {};
      memcpy((void*)pool, &fresh, sizeof fresh);
      pool->process = getpid();
    }
  }
  Pool* mine = pool;
  pthread_mutex_unlock(&pool_lock);
  return mine;
}

// Does all items with `threads` threads, the caller's included. Called with p.call held.
bool run(Pool& p, Job job, int threads) {
  job.next = 0;
  const int useful = (threads < job.items ? threads : job.items) - 1;
  if (useful > 0) {
    pthread_mutex_lock(&p.lock);
    while (p.helpers < useful) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, help, &p)) break;
      pthread_detach(thread);
      ++p.helpers;
    }
    p.job = &job;
    p.wanted = useful;
    if (useful == 1) pthread_cond_signal(&p.wake);
    else pthread_cond_broadcast(&p.wake);
    pthread_mutex_unlock(&p.lock);
  }
  const bool done = work(&job, p.scratch);
  pthread_mutex_lock(&p.lock);
  p.job = nullptr;
  while (p.working) pthread_cond_wait(&p.idle, &p.lock);
  pthread_mutex_unlock(&p.lock);
  return done || __atomic_load_n(&job.next, __ATOMIC_RELAXED) >= job.items;
}

// ---- attention ----

struct AttentionJob {
  const InstructionSet* set;
  const Attention* a;
  Plan plan;
};

void attend_item(const void* what, int item, float* scratch) {
  const AttentionJob& job = *(const AttentionJob*)what;
  job.set->attend(*job.a, job.plan, item, scratch);
}

int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Eight parts per thread, so that a thread that was held up costs an eighth, but no part under four blocks:
// each part rotates its queries anew, which costs as much as head_dim / 256 of a block.
constexpr int kPartsPerThread = 8, kLeastBlocks = 4, kTailPartTokens = 512;

Plan cut(const Attention& a, int threads) {
  Plan plan = {};
  plan.group = a.num_q_heads / a.num_kv_heads;
  plan.rows = a.batch * plan.group * a.num_queries;
  const int wanted = threads == 1 ? 1 : (threads * kPartsPerThread + a.num_kv_heads - 1) / a.num_kv_heads;
  plan.num_splits = a.num_blocks ? clamp(wanted, 1, (a.num_blocks + kLeastBlocks - 1) / kLeastBlocks) : 0;
  plan.sink_parts = a.num_sinks > 0;
  plan.tail_part_tokens = kTailPartTokens;
  plan.tail_parts = (a.num_tail + kTailPartTokens - 1) / kTailPartTokens;
  plan.parts = plan.num_splits + plan.sink_parts + plan.tail_parts;
  plan.items = a.num_kv_heads * (plan.num_splits + plan.sink_parts + a.batch * plan.tail_parts);
  return plan;
}

struct PrefillJob {
  const InstructionSet* set;
  const Prefill* prefill;
};

void prefill_item(const void* what, int item, float* scratch) {
  const PrefillJob& job = *(const PrefillJob*)what;
  job.set->prefill(*job.prefill, item, scratch);
}

struct RecodeJob {
  const Recode* recode;
  void (*one)(const Recode&, int, float*);
};

void recode_item(const void* what, int item, float* scratch) {
  const RecodeJob& job = *(const RecodeJob*)what;
  job.one(*job.recode, item, scratch);
}

int recode(const Recode* job, const InstructionSet* set, int threads, bool encode) {
  Pool* mine = current();
  if (!mine) return 1;
  Pool& p = *mine;
  const RecodeJob what = {job, encode ? set->encode : set->decode};
  pthread_mutex_lock(&p.call);
  const bool done = run(p, {recode_item, &what, job->num_kv_heads * job->num_blocks,
                            set->recode_scratch(job->head_dim), 0}, threads);
  pthread_mutex_unlock(&p.call);
  return done ? 0 : 1;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The named instruction set, the best one for "", or null if this machine lacks it. To be asked for once:
// a virtual machine traps the question.
EXPORT const InstructionSet* longleaf_instruction_set(const char* name) { return find(name); }

EXPORT const char* longleaf_name(const InstructionSet* set) { return set->name; }

// These return 0, or 1 if memory ran out.
EXPORT int longleaf_attend(const Attention* a, const InstructionSet* set, int threads) {
  AttentionJob job = {set, a, cut(*a, threads)};
  Plan& plan = job.plan;
  const size_t partials = (size_t)a->num_kv_heads * plan.parts * plan.rows;
  Pool* mine = current();
  if (!mine) return 1;
  Pool& p = *mine;
  pthread_mutex_lock(&p.call);
  float* memory = (float*)p.partials.reserve(sizeof(float) * (partials * (a->head_dim + 2) + a->num_kv_heads));
  bool done = false;
  if (memory) {
    plan.out = memory;
    plan.max = plan.out + partials * a->head_dim;
    plan.sum = plan.max + partials;
    plan.pending = (int32_t*)(plan.sum + partials);
    for (int h = 0; h < a->num_kv_heads; ++h) plan.pending[h] = plan.items / a->num_kv_heads;
    done = run(p, {attend_item, &job, plan.items, set->attend_scratch(*a, plan), 0}, threads);
  }
  pthread_mutex_unlock(&p.call);
  return done ? 0 : 1;
}

EXPORT int longleaf_prefill(const Prefill* a, const InstructionSet* set, int threads) {
  const PrefillJob job = {set, a};
  Pool* mine = current();
  if (!mine) return 1;
  Pool& p = *mine;
  pthread_mutex_lock(&p.call);
  const bool done = run(p, {prefill_item, &job, set->prefill_items(*a), set->prefill_scratch(*a), 0}, threads);
  pthread_mutex_unlock(&p.call);
  return done ? 0 : 1;
}

EXPORT int longleaf_encode(const Recode* job, const InstructionSet* set, int threads) {
  return recode(job, set, threads, true);
}

EXPORT int longleaf_decode(const Recode* job, const InstructionSet* set, int threads) {
  return recode(job, set, threads, false);
}
