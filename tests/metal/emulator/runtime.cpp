// Executor for kernels compiled through language.h + collectives.h (x86-64 Linux).
//
// Every thread of a threadgroup is a fiber on one OS thread. Barriers and SIMD-group operations are
// rendezvous points; a rendezvous that some lanes cannot reach is an error with the lane numbers.
// Device buffers and threadgroup variables live in one sparse arena with guard slots between them.
// The kernel is compiled with -fsanitize=thread but linked without that runtime: its __tsan_* hooks
// are defined here and check bounds, alignment, initialisation and races on every access.
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <xmmintrin.h>

typedef uint64_t u64; typedef uint32_t u32; typedef uint16_t u16; typedef uint8_t u8;
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

// ---------------------------------------------------------------- interface with Python (ctypes)
enum { OUTPUT = 1, INITIALISED = 2, CONSTANT = 4 };
struct Buffer { const char* name; void* host; u64 bytes; u32 elem, flags, offset, pad; };
struct Options { u64 seed; u32 strict, ftz, timeout_ms, races, tg_limit, max_findings; };
constexpr u32 COUNTED_BUFFERS = 64, COUNTED_OPS = 40;
struct OpCount { char name[40]; u64 count; };              // of a simdgroup's operations, or a threadgroup's barriers
struct Result {
  int status; u32 tg_bytes; u64 threads, switches, accesses, rendezvous; double seconds;
  u64 read[COUNTED_BUFFERS], written[COUNTED_BUFFERS], tg_read, tg_written;   // bytes
  u64 loads[COUNTED_BUFFERS], tg_loads, tg_stores;                           // accesses of any width
  OpCount ops[COUNTED_OPS]; char report[1 << 16];
};
struct Info {                                             // same layout as mtl::thread_info
  u32 pos_grid[3], pos_tg[3], tg_pos[3], grid[3], tg[3], dispatch_tg[3], tgs[3];
  u32 index, lane, simd, simds, dispatch_simds, quad_lane, quad, quads;
};
typedef void (*Entry)(const u64*, const Info*);

// ---------------------------------------------------------------- state
struct Exchange { u8 slot[32][64], result[64], order[32]; u32 count, mask, done, lane_base; };
enum State { RUN, AT_SIMD, AT_BARRIER, DONE };
struct Fiber {
  void* sp; State state; u32 simd, lane; const void* in; u32 bytes, quad; const char* op; int line, flags; void* pc; Exchange* x; Info info;
};
struct Simd { u32 all, run, wait, bar, epoch_tg, epoch_dev, parity; Exchange x[2], q[2][8]; };
struct Cell { u32 wtg, wep, wpc, rtg, rep, rpc; u16 wt, wsg, r1, r1sg, r2, r2sg; u8 watomic, ratomic; };
struct Region { u64 base, bytes; u32 elem; u8 tg, output, init, constant; u32 serial; const char* name; int line; Cell* cells; };

constexpr u64 SLOT = 1 << 16, ARENA = 1ull << 37, STACK = 1 << 17;
constexpr u32 MAXT = 1024, NONE = 0xffff;
static u8* arena; static u64 arena_top;
static u16 slot_of[ARENA / SLOT];
static Region regions[512]; static u32 n_regions;
static u8* stacks; static u32 n_stacks;
static Fiber fibers[MAXT]; static Simd simds[32]; static u32 n_fibers, n_simds;
static Fiber* cur; static void* main_sp;
static Options opt; static Result* res; static size_t rep_len; static u32 n_find;
static u64 rng; static u32 serial, epoch_tg, epoch_dev, tg_used; static Entry entry_fn; static u64 addr[64];
static u64 seen[1024]; static u32 n_seen; static volatile bool in_run;

extern "C" { void mtl_switch(void** save, void* to); void mtl_resume(); }
asm(R"(.text
.globl mtl_switch
.type mtl_switch,@function
mtl_switch: push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp,(%rdi); mov %rsi,%rsp
mtl_resume: pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret
)");

static u64 rnd() { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; }
static u32 off(void* pc) { return (u32)((u8*)pc - (u8*)&__ehdr_start); }

// ---------------------------------------------------------------- findings: "kind \t pc \t other pc \t text \n"
static void say(const char* kind, u32 pc, u32 pc2, const char* fmt, va_list ap) {
  u64 key = ((u64)pc << 32 | pc2) * 31 + (u8)kind[0] * 7 + (u8)kind[1];
  for (u32 i = 0; i < n_seen; i++) if (seen[i] == key) return;
  if (n_seen < 1024) seen[n_seen++] = key;
  if (++n_find > opt.max_findings || rep_len > sizeof(res->report) - 2048) return;
  rep_len += snprintf(res->report + rep_len, 200, "%s\t%x\t%x\t", kind, pc, pc2);
  rep_len += vsnprintf(res->report + rep_len, 1500, fmt, ap);
  res->report[rep_len++] = '\n'; res->report[rep_len] = 0;
  res->status |= 1;
}
static void finding(const char* kind, u32 pc, u32 pc2, const char* fmt, ...) { va_list ap; va_start(ap, fmt); say(kind, pc, pc2, fmt, ap); va_end(ap); }
[[noreturn]] static void leave() { res->status |= 2; void* dummy; mtl_switch(&dummy, main_sp); __builtin_unreachable(); }
[[noreturn]] static void fatal(const char* kind, u32 pc, u32 pc2, const char* fmt, ...) { va_list ap; va_start(ap, fmt); say(kind, pc, pc2, fmt, ap); va_end(ap); leave(); }

static const char* who(const Fiber* f) {
  static char b[4][160]; static int k; char* s = b[k++ & 3];
  snprintf(s, 160, "thread (%u,%u,%u) of threadgroup (%u,%u,%u) [simdgroup %u lane %u]", f->info.pos_tg[0], f->info.pos_tg[1], f->info.pos_tg[2],
           f->info.tg_pos[0], f->info.tg_pos[1], f->info.tg_pos[2], f->simd, f->lane);
  return s;
}
static const char* lanes(u32 m) {
  static char b[4][200]; static int k; char* s = b[k++ & 3]; int n = 0;
  for (u32 i = 0; i < 32; i++) if (m >> i & 1) { u32 j = i; while (j < 31 && m >> (j + 1) & 1) j++; n += snprintf(s + n, 200 - n, i == j ? "%s%u" : "%s%u-%u", n ? "," : "", i, j); i = j; }
  if (!n) snprintf(s, 200, "none");
  return s;
}

static const char* last_op; static u32 last_op_index;       // reset by every dispatch
static void count_op(const char* name) {
  if (name != last_op) {                                    // names are literals of the kernel: mostly the same again
    u32 i = 0; while (i < COUNTED_OPS - 1 && res->ops[i].count && strcmp(res->ops[i].name, name)) i++;
    last_op = name; last_op_index = i; snprintf(res->ops[i].name, sizeof res->ops[i].name, "%s", name);
  }
  res->ops[last_op_index].count++;
}

// ---------------------------------------------------------------- scheduler
static void describe(Simd& s, char* out, size_t n) {       // "lanes 0-15 at simd_sum (line 9), lanes 16-31 finished"
  size_t k = 0; u32 left = s.all; out[0] = 0; u32 base = (u32)(&s - simds) * 32;
  while (left) {
    u32 i = __builtin_ctz(left), m = 0; Fiber& a = fibers[base + i];
    for (u32 j = i; j < 32; j++) if (left >> j & 1) { Fiber& b = fibers[base + j]; if (b.state == a.state && (a.state == DONE || a.state == RUN || b.pc == a.pc)) m |= 1u << j; }
    left &= ~m;
    if (a.state == DONE) k += snprintf(out + k, n - k, "%slanes %s finished", k ? "; " : "", lanes(m));
    else if (a.state == RUN) k += snprintf(out + k, n - k, "%slanes %s running", k ? "; " : "", lanes(m));
    else k += snprintf(out + k, n - k, "%slanes %s at %s (line %d)", k ? "; " : "", lanes(m), a.op, a.line);
    if (k > n - 200) return;
  }
}
static void resolve(Simd& s) {                            // no lane of s can run and some wait at a SIMD-group operation
  u32 base = (u32)(&s - simds) * 32, set = 0; Fiber& first = fibers[base + __builtin_ctz(s.wait)];
  for (u32 m = s.wait; m; m &= m - 1) if (fibers[base + __builtin_ctz(m)].pc == first.pc) set |= m & -m;
  if (opt.strict && (set != s.all || s.all != 0xffffffffu)) {
    char d[900]; describe(s, d, sizeof d);
    if (set == s.all)
      fatal("partial-simdgroup", off(first.pc), 0, "%s (line %d) executed by simdgroup %u of threadgroup (%u,%u,%u) which has only %d of 32 threads (threadgroup is %ux%ux%u)", first.op, first.line, first.simd,
            first.info.tg_pos[0], first.info.tg_pos[1], first.info.tg_pos[2], __builtin_popcount(s.all), first.info.tg[0], first.info.tg[1], first.info.tg[2]);
    fatal("divergence", off(first.pc), 0, "%s (line %d) not reached by all lanes of simdgroup %u of threadgroup (%u,%u,%u): %s", first.op, first.line, first.simd,
          first.info.tg_pos[0], first.info.tg_pos[1], first.info.tg_pos[2], d);
  }
  res->rendezvous++;
  count_op(first.op[0] == '!' ? first.op + 1 : first.op);
  u32 p = s.parity ^= 1;
  for (u32 m = set; m; m &= m - 1) {
    u32 l = __builtin_ctz(m); Fiber& f = fibers[base + l]; Exchange& x = f.quad ? s.q[p][l / 4] : s.x[p];
    if (f.bytes) __builtin_memcpy(x.slot[l], f.in, f.bytes);
    f.x = &x; f.state = RUN;
    if (!f.quad ? m == set : (set & (0xfu << (l & ~3u)) & ((1u << l) - 1)) == 0) {
      x.mask = f.quad ? set & (0xfu << (l & ~3u)) : set; x.done = 0; x.lane_base = f.quad ? l & ~3u : 0; x.count = 0;
      if (opt.seed) {                                     // any order of addition is legal: rotate it
        u32 r = rnd() & 31; for (u32 i = 0; i < 32; i++) { u32 j = (i + r) & 31; if (x.mask >> j & 1) x.order[x.count++] = j; }
      } else for (u32 k = x.mask; k; k &= k - 1) x.order[x.count++] = __builtin_ctz(k);
    }
    if (f.op[0] == '!') { if (f.flags & 2) s.epoch_tg += m == set; if (f.flags & 1) s.epoch_dev += m == set; }
  }
  s.wait &= ~set; s.run |= set;
}
static Fiber* pick(Simd& s) {
  u32 l = __builtin_ctz(s.run);
  if (opt.seed) { u32 r = rnd() & 31; u32 hi = s.run >> r << r; l = __builtin_ctz(hi ? hi : s.run); }
  return &fibers[(&s - simds) * 32 + l];
}
static Fiber* next(Simd* s) {                             // the fiber to run now; null when all have finished
  for (;;) {
    if (opt.seed && n_simds > 1 && (rnd() & 7) == 0) { Simd* t = &simds[rnd() % n_simds]; if (t->run) s = t; }
    if (s->run) return pick(*s);
    if (s->wait) { resolve(*s); continue; }
    u32 k = opt.seed ? rnd() % n_simds : 0; Simd* t = 0;
    for (u32 i = 0; i < n_simds && !t; i++) { Simd* c = &simds[(i + k) % n_simds]; if (c->run || c->wait) t = c; }
    if (t) { s = t; continue; }
    u32 done = 0, bar = 0; Fiber* a = 0; bool same = true;
    for (u32 i = 0; i < n_fibers; i++) {
      Fiber& f = fibers[i];
      if (f.state == DONE) done++;
      else { bar++; if (!a) a = &f; else if (f.pc != a->pc) same = false; }
    }
    if (!bar) return 0;
    if (done || !same) {
      char d[1200]; size_t n = 0;
      for (u32 i = 0; i < n_simds && n < 900; i++) { char e[300]; describe(simds[i], e, sizeof e); n += snprintf(d + n, sizeof d - n, "%ssimdgroup %u: %s", n ? " | " : "", i, e); }
      fatal("barrier-divergence", off(a->pc), 0, "threadgroup_barrier (line %d) not reached by all threads of threadgroup (%u,%u,%u): %s", a->line, a->info.tg_pos[0], a->info.tg_pos[1], a->info.tg_pos[2], d);
    }
    res->rendezvous++;
    count_op(a->op);
    if (a->flags & 2) epoch_tg++;
    if (a->flags & 1) epoch_dev++;
    for (u32 i = 0; i < n_simds; i++) { simds[i].run = simds[i].bar; simds[i].bar = 0; }
    for (u32 i = 0; i < n_fibers; i++) fibers[i].state = RUN;
    s = &simds[0];
  }
}
static void block() {
  Fiber* f = cur; Fiber* n = next(&simds[f->simd]);
  if (n == f) return;
  res->switches++; cur = n; mtl_switch(&f->sp, n ? n->sp : main_sp);
}
static void fiber_main() {
  entry_fn(addr, &cur->info);
  Fiber* f = cur; Simd& s = simds[f->simd];
  f->state = DONE; s.run &= ~(1u << f->lane);
  Fiber* n = next(&s);
  res->switches++; cur = n; void* dummy; mtl_switch(&dummy, n ? n->sp : main_sp);
}

extern "C" {
Exchange* mtl_rt_simd(const void* in, u32 bytes, const char* op, int line, int quad) {
  Fiber* f = cur; Simd& s = simds[f->simd]; u32 b = 1u << f->lane;
  f->pc = __builtin_return_address(0); f->in = in; f->bytes = bytes; f->op = op; f->line = line; f->quad = quad; f->state = AT_SIMD; f->flags = 0;
  s.run &= ~b; s.wait |= b;
  block();
  return f->x;
}
void mtl_rt_barrier(int scope, int flags, int line) {
  Fiber* f = cur; Simd& s = simds[f->simd]; u32 b = 1u << f->lane;
  f->pc = __builtin_return_address(0); f->line = line; f->flags = flags; f->bytes = 0; f->quad = 0;
  if (scope) { f->op = "threadgroup_barrier"; f->state = AT_BARRIER; s.run &= ~b; s.bar |= b; }
  else { f->op = "!simdgroup_barrier"; f->state = AT_SIMD; s.run &= ~b; s.wait |= b; }
  block();
}
u32 mtl_rt_lane() { return cur->lane; }
void mtl_rt_lane_error(const char* op, int line, u32 lane) {
  finding("inactive-lane", off(__builtin_return_address(0)), 0, "%s (line %d): %s reads lane %d, which takes no part", op, line, who(cur), (int)lane);
}

// ---------------------------------------------------------------- memory
static u32 add_region(u64 bytes, u32 elem, u64& top, u64 gap, u32 offset, const char* name) {
  u64 a = (top + gap + SLOT - 1) / SLOT * SLOT, need = (bytes + offset + SLOT - 1) / SLOT * SLOT;
  if (!need) need = SLOT;
  if (a + need + SLOT > ARENA || n_regions >= 511) return 0;
  mprotect(arena + a, need, PROT_READ | PROT_WRITE);
  u32 id = ++n_regions; Region& r = regions[id];
  memset(&r, 0, sizeof r);
  r.base = a + offset; r.bytes = bytes; r.elem = elem ? elem : 1; r.name = name;
  for (u64 i = a / SLOT; i < (a + need) / SLOT; i++) slot_of[i] = id;
  top = a + need;
  return id;
}
static void need_cells(Region& r) {
  u64 n = r.bytes / r.elem + 1;
  r.cells = (Cell*)mmap(0, n * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
void* mtl_rt_tg(u64 bytes, u32 elem, const char* name, int line) {
  u32 id = 0;
  for (u32 i = 1; i <= n_regions; i++) if (regions[i].tg && regions[i].line == line && regions[i].bytes == bytes && !strcmp(regions[i].name, name)) { id = i; break; }
  if (!id) {
    id = add_region(bytes, elem > 4 ? 4 : elem, arena_top, 4 * SLOT, 0, name);
    if (!id) fatal("limit", 0, 0, "no room for threadgroup variable '%s'", name);
    regions[id].tg = 1; regions[id].line = line; need_cells(regions[id]);
  }
  Region& r = regions[id];
  if (r.serial != serial) {                               // first thread of this threadgroup: fresh, poisoned
    r.serial = serial; memset(arena + r.base, 0xff, bytes);
    tg_used += (bytes + 15) & ~15ull;
    if (tg_used > res->tg_bytes) res->tg_bytes = tg_used;
    if (tg_used > opt.tg_limit) fatal("threadgroup-memory", off(__builtin_return_address(0)), 0, "threadgroup variables need %u bytes, the limit is %u ('%s', line %d)", tg_used, opt.tg_limit, name, line);
  }
  return arena + r.base;
}

static const char* place(u64 o) {                         // describes an arena offset
  static char b[300]; Region* best = 0; u64 d = ~0ull;
  for (u32 i = 1; i <= n_regions; i++) { Region& r = regions[i]; u64 e = o < r.base ? r.base - o : o < r.base + r.bytes ? 0 : o - (r.base + r.bytes) + 1; if (e < d) { d = e; best = &r; } }
  if (!best) return "unknown memory";
  long idx = (long)(o - best->base) / (long)best->elem; if (o < best->base) idx = -((long)(best->base - o + best->elem - 1) / (long)best->elem);
  snprintf(b, sizeof b, "%s '%s' element %ld of %lu", best->tg ? "threadgroup variable" : best->constant ? "constant buffer" : "buffer", best->name, idx, (unsigned long)(best->bytes / best->elem));
  return b;
}
static Fiber* thr(u32 t) { return &fibers[t]; }

static inline void cell_read(Region& r, Cell& c, u32 t, u32 sg, u32 ep, u32 se, u32 pc, int atomic, u64 o) {
  bool fresh = c.wtg != serial;
  if (r.tg ? fresh : !r.init && c.wtg == 0)
    finding("uninitialised", pc, 0, "read of %s, never written: %s", place(o), who(cur));
  else if (!fresh) {
    if (opt.races && c.wt != t && c.wep == ep && !(c.wt / 32 == sg && c.wsg < se) && !(atomic && c.watomic))
      finding("race", pc, c.wpc, "%s: written by %s and read by %s without a barrier between", place(o), who(thr(c.wt)), who(cur));
  } else if (opt.races && !r.tg && c.wtg && !(atomic && c.watomic))
    finding("race", pc, c.wpc, "%s: written by another threadgroup and read by %s in one dispatch", place(o), who(cur));
  if (c.rtg != serial || c.rep != ep) { c.rtg = serial; c.rep = ep; c.r1 = t; c.r1sg = se; c.r2 = NONE; c.rpc = pc; c.ratomic = atomic; return; }
  c.ratomic &= atomic;
  if (c.r1 == t) c.r1sg = se;
  else if (c.r2 == NONE || c.r2 == t || (c.r2 / 32 == c.r1 / 32 && sg != c.r1 / 32)) { c.r2 = t; c.r2sg = se; c.rpc = pc; }
  else if (c.r1 / 32 == sg && c.r1sg < se) { c.r1 = t; c.r1sg = se; }
}
static inline void cell_write(Region& r, Cell& c, u32 t, u32 sg, u32 ep, u32 se, u32 pc, int atomic, u64 o) {
  if (opt.races) {
    if (c.wtg == serial) {
      if (c.wt != t && c.wep == ep && !(c.wt / 32 == sg && c.wsg < se) && !(atomic && c.watomic))
        finding("race", pc, c.wpc, "%s: written by %s and by %s without a barrier between", place(o), who(thr(c.wt)), who(cur));
    } else if (!r.tg && c.wtg && !(atomic && c.watomic))
      finding("race", pc, c.wpc, "%s: written by two threadgroups of one dispatch, here by %s", place(o), who(cur));
    if (c.rtg == serial && c.rep == ep && !(atomic && c.ratomic)) {
      u32 o1 = c.r1 != t && !(c.r1 / 32 == sg && c.r1sg < se), o2 = c.r2 != NONE && c.r2 != t && !(c.r2 / 32 == sg && c.r2sg < se);
      if (o1 || o2) finding("race", pc, c.rpc, "%s: read by %s and written by %s without a barrier between", place(o), who(thr(o1 ? c.r1 : c.r2)), who(cur));
    } else if (!r.tg && c.rtg && c.rtg != serial && !(atomic && c.ratomic))
      finding("race", pc, c.rpc, "%s: read by another threadgroup and written by %s in one dispatch", place(o), who(cur));
  }
  c.wtg = serial; c.wep = ep; c.wt = t; c.wsg = se; c.wpc = pc; c.watomic = atomic;
}
static __attribute__((noinline)) void tracked(Region& r, u64 o, u32 n, int write, u32 pc, int atomic) {
  Simd& s = simds[cur->simd]; u32 t = cur->simd * 32 + cur->lane, ep = r.tg ? epoch_tg : epoch_dev, se = r.tg ? s.epoch_tg : s.epoch_dev;
  for (u64 i = (o - r.base) / r.elem, e = (o - r.base + n - 1) / r.elem; i <= e; i++) {
    if (write != 2) cell_read(r, r.cells[i], t, cur->simd, ep, se, pc, atomic, r.base + i * r.elem);
    if (write) cell_write(r, r.cells[i], t, cur->simd, ep, se, pc, atomic, r.base + i * r.elem);
  }
}
// write: 0 read, 1 read and write, 2 write
static inline __attribute__((always_inline)) void access(const volatile void* p, u32 n, int write, void* ra, bool aligned, int atomic = 0) {
  u64 o = (u64)p - (u64)arena;
  if (o >= ARENA) return;                                 // stack, constants, the runtime's own memory
  res->accesses++;
  u32 pc = off(ra) - 1, id = slot_of[o / SLOT]; Region& r = regions[id];
  if (__builtin_expect(o - r.base + n > r.bytes || o < r.base, 0))
    fatal("out-of-bounds", pc, 0, "%s of %u bytes at %s: %s", write ? "write" : "read", n, place(o), who(cur));
  if (__builtin_expect(aligned && (o & (n - 1)), 0)) finding("misaligned", pc, 0, "%u-byte access at %s is not %u-byte aligned: %s", n, place(o), n, who(cur));
  u32 buffer = id ? (id - 1) % COUNTED_BUFFERS : 0;
  if (write != 2) { if (r.tg) { res->tg_read += n; res->tg_loads++; } else { res->read[buffer] += n; res->loads[buffer]++; } }
  if (write) { if (r.tg) { res->tg_written += n; res->tg_stores++; } else res->written[buffer] += n; }
  if (r.cells) tracked(r, o, n, write, pc, atomic);
  else if (__builtin_expect(write, 0)) finding("write-to-input", pc, 0, "write to %s, an input: %s", place(o), who(cur));
}
#define HOOK(n) \
  void __tsan_read##n(void* p) { access(p, n, 0, __builtin_return_address(0), true); } \
  void __tsan_write##n(void* p) { access(p, n, 2, __builtin_return_address(0), true); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, 0, __builtin_return_address(0), false); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, 2, __builtin_return_address(0), false); } \
  void __tsan_read_write##n(void* p) { access(p, n, 1, __builtin_return_address(0), true); } \
  void __tsan_unaligned_read_write##n(void* p) { access(p, n, 1, __builtin_return_address(0), false); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void* __tsan_memcpy(void* d, const void* s, u64 n) { if (n) { access(s, n, 0, __builtin_return_address(0), false); access(d, n, 2, __builtin_return_address(0), false); } return memmove(d, s, n); }
void* __tsan_memmove(void* d, const void* s, u64 n) { if (n) { access(s, n, 0, __builtin_return_address(0), false); access(d, n, 2, __builtin_return_address(0), false); } return memmove(d, s, n); }
void* __tsan_memset(void* d, int v, u64 n) { if (n) access(d, n, 2, __builtin_return_address(0), false); return memset(d, v, n); }
void __tsan_init() {}
void mtl_rt_atomic(const volatile void* p, u32 n, int write, int) { access(p, n, write, __builtin_return_address(0), true, 1); }

// Basic blocks of a counting build, numbered by counts.py.
static u64 block_counts[1 << 16];
void mtl_count(u32 n) { block_counts[n & 0xffff]++; }
u64* mtl_block_counts() { return block_counts; }
void __sanitizer_cov_trace_pc_guard(u32*) {}
void __sanitizer_cov_trace_pc_guard_init(u32*, u32*) {}

// UBSan checks the kernel is compiled with; every data record starts with {file, line, column}
struct Loc { const char* file; u32 line, col; };
#define UB(name, kind, what, stop) void __ubsan_handle_##name(Loc* l, u64 a, u64) { \
  void (*report)(const char*, u32, u32, const char*, ...) = stop ? (void (*)(const char*, u32, u32, const char*, ...))fatal : finding; \
  report(kind, off(__builtin_return_address(0)) - 1, 0, what ": %s (%s:%u)", who(cur), l->file, l->line); (void)a; }
UB(add_overflow, "overflow", "signed integer overflow in +", 0) UB(sub_overflow, "overflow", "signed integer overflow in -", 0)
UB(mul_overflow, "overflow", "signed integer overflow in *", 0) UB(negate_overflow, "overflow", "signed integer overflow in unary -", 0)
UB(divrem_overflow, "division", "integer division by zero or overflow", 1) UB(shift_out_of_bounds, "shift", "shift by the width of the type or more", 0)
UB(float_cast_overflow, "float-cast", "float value does not fit the integer type", 0)
struct Mismatch { Loc loc; void* type; u8 log_align, kind; };
void __ubsan_handle_type_mismatch_v1(Mismatch* m, u64 p) {
  u64 o = p - (u64)arena;
  if (o < ARENA) finding("misaligned", off(__builtin_return_address(0)) - 1, 0, "access at %s is not %u-byte aligned: %s", place(o), 1u << m->log_align, who(cur));
}
void __ubsan_handle_out_of_bounds(Loc* l, u64 i) { fatal("array-index", off(__builtin_return_address(0)) - 1, 0, "index %ld outside of the array: %s (%s:%u)", (long)i, who(cur), l->file, l->line); }

// conversions compiler-rt would provide
static u16 bf16(float f) { u32 u; memcpy(&u, &f, 4); if ((u & 0x7fffffff) > 0x7f800000) return u >> 16 | 0x40; return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
__m128 __truncsfbf2(float f) { u32 u = bf16(f); float r; memcpy(&r, &u, 4); return _mm_set_ss(r); }
__m128 __truncdfbf2(double d) { u32 u = bf16((float)d); float r; memcpy(&r, &u, 4); return _mm_set_ss(r); }

// ---------------------------------------------------------------- dispatch
static void on_signal(int sig, siginfo_t* si, void* u) {
  ucontext_t* uc = (ucontext_t*)u; void* pc = (void*)uc->uc_mcontext.gregs[REG_RIP];
  if (!in_run) { signal(sig, SIG_DFL); return; }
  u64 a = (u64)si->si_addr, o = a - (u64)arena, st = a - (u64)stacks;
  u32 rel = off(pc);
  if (sig == SIGVTALRM) finding("timeout", rel, 0, "no end after %u ms of CPU time: %s", opt.timeout_ms, cur ? who(cur) : "?");
  else if (sig == SIGSEGV && o < ARENA) finding("out-of-bounds", rel, 0, "guard page hit at %s: %s", place(o), who(cur));
  else if (sig == SIGSEGV && st < (u64)n_stacks * STACK) finding("stack-overflow", rel, 0, "more than %lu bytes of thread memory: %s", (unsigned long)STACK, who(cur));
  else if (sig == SIGILL) finding("array-index", rel, 0, "access outside of a thread array: %s", cur ? who(cur) : "?");   // -fsanitize=local-bounds traps
  else finding("crash", rel, 0, "signal %d at address %p: %s", sig, si->si_addr, cur ? who(cur) : "?");
  res->status |= 2;
  uc->uc_mcontext.gregs[REG_RSP] = (greg_t)main_sp;       // resume on the main stack, as mtl_switch would
  uc->uc_mcontext.gregs[REG_RIP] = (greg_t)&mtl_resume;
}

int mtl_run(Entry fn, Buffer* bufs, u32 nb, const u32* grid, const u32* tg_in, const Options* o, Result* out) {
  opt = *o; res = out; memset(out, 0, sizeof *out); last_op = 0; rep_len = n_find = n_seen = 0; entry_fn = fn; rng = opt.seed * 0x9e3779b97f4a7c15ull + 1; serial = 0;
  struct timespec t0, t1; clock_gettime(CLOCK_MONOTONIC, &t0);
  if (!arena) arena = (u8*)mmap(0, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) { arena = 0; snprintf(res->report, 100, "limit\t0\t0\tcannot reserve the arena\n"); return res->status = 3; }
  u32 tg[3], tgs[3]; u64 nt = 1;
  for (int i = 0; i < 3; i++) { tg[i] = tg_in[i] < grid[i] ? tg_in[i] : grid[i]; tgs[i] = tg[i] ? (grid[i] + tg[i] - 1) / tg[i] : 0; nt *= tg[i]; }
  if (nt == 0 || nt > MAXT) { snprintf(res->report, 200, "limit\t0\t0\tthreadgroup of %lu threads (1 to %u allowed)\n", (unsigned long)nt, MAXT); return res->status = 3; }
  if (!stacks) stacks = (u8*)mmap(0, MAXT * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (; n_stacks < nt; n_stacks++) mprotect(stacks + n_stacks * STACK, 4096, PROT_NONE);

  arena_top = SLOT; n_regions = 0; cur = 0;
  for (u32 i = 0; i < nb; i++) {
    Buffer& b = bufs[i]; u64 gap = b.bytes < (1 << 20) ? 1 << 20 : b.bytes;
    u32 id = add_region(b.bytes, b.elem, arena_top, gap, b.offset, b.name);
    if (!id) { snprintf(res->report, 200, "limit\t0\t0\tbuffer '%s' does not fit the arena\n", b.name); return res->status = 3; }
    Region& r = regions[id];
    r.output = (b.flags & OUTPUT) != 0; r.init = (b.flags & INITIALISED) != 0; r.constant = (b.flags & CONSTANT) != 0;
    if (r.init) memcpy(arena + r.base, b.host, b.bytes); else memset(arena + r.base, 0xff, b.bytes);
    if (r.output) need_cells(r);
    addr[i] = (u64)arena + r.base;
  }

  struct sigaction sa, old[6]; const int sigs[6] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM, SIGTRAP};
  static u8 alt[1 << 16]; stack_t ss = {alt, 0, sizeof alt}, oss; sigaltstack(&ss, &oss);
  memset(&sa, 0, sizeof sa); sa.sa_sigaction = on_signal; sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 6; i++) sigaction(sigs[i], &sa, &old[i]);
  struct itimerval tv = {{0, 0}, {opt.timeout_ms / 1000, (opt.timeout_ms % 1000) * 1000}}, otv; setitimer(ITIMER_VIRTUAL, &tv, &otv);
  u32 csr = _mm_getcsr(); if (opt.ftz) _mm_setcsr(csr | 0x8040);
  in_run = true;

  u32 total = tgs[0] * tgs[1] * tgs[2], start = opt.seed ? (u32)(rnd() % total) : 0, step = 1;
  if (opt.seed && total > 2) do step = 1 + (u32)(rnd() % (total - 1)); while (__extension__({ u32 x = step, y = total; while (y) { u32 z = x % y; x = y; y = z; } x; }) != 1);
  for (u32 q = 0; q < total && !(res->status & 2); q++) {
    u32 g = (u32)((start + (u64)q * step) % total), p[3] = {g % tgs[0], g / tgs[0] % tgs[1], g / tgs[0] / tgs[1]}, d[3]; serial++;
    for (int i = 0; i < 3; i++) d[i] = p[i] == tgs[i] - 1 ? grid[i] - p[i] * tg[i] : tg[i];
    n_fibers = d[0] * d[1] * d[2]; n_simds = (n_fibers + 31) / 32; epoch_tg = epoch_dev = 1; tg_used = 0; res->threads += n_fibers;
    for (u32 i = 0; i < n_simds; i++) {
      Simd& s = simds[i]; u32 n = n_fibers - i * 32; s.all = s.run = n >= 32 ? 0xffffffffu : (1u << n) - 1; s.wait = s.bar = s.parity = 0; s.epoch_tg = s.epoch_dev = 0;
    }
    for (u32 i = 0; i < n_fibers; i++) {
      Fiber& f = fibers[i]; Info& n = f.info; u32 x[3] = {i % d[0], i / d[0] % d[1], i / d[0] / d[1]};
      f.state = RUN; f.simd = i / 32; f.lane = i % 32;
      for (int k = 0; k < 3; k++) { n.pos_tg[k] = x[k]; n.tg_pos[k] = p[k]; n.pos_grid[k] = p[k] * tg[k] + x[k]; n.grid[k] = grid[k]; n.tg[k] = d[k]; n.dispatch_tg[k] = tg[k]; n.tgs[k] = tgs[k]; }
      n.index = i; n.lane = f.lane; n.simd = f.simd; n.simds = n_simds; n.dispatch_simds = (u32)(nt + 31) / 32; n.quad_lane = i % 4; n.quad = i / 4; n.quads = (n_fibers + 3) / 4;
      u64* sp = (u64*)(stacks + (i + 1) * STACK - 4096 - (i % 32) * 320);   // stagger: not all in one cache set
      *--sp = 0; *--sp = (u64)fiber_main; sp -= 6; f.sp = sp;
    }
    Fiber* f = next(&simds[opt.seed ? rnd() % n_simds : 0]); cur = f; mtl_switch(&main_sp, f->sp);
  }

  in_run = false; cur = 0;
  _mm_setcsr(csr); setitimer(ITIMER_VIRTUAL, &otv, 0);
  for (int i = 0; i < 6; i++) sigaction(sigs[i], &old[i], 0);
  sigaltstack(&oss, 0);
  for (u32 i = 0; i < nb; i++) {
    Region& r = regions[i + 1]; Buffer& b = bufs[i];
    if (!r.output) continue;
    memcpy(b.host, arena + r.base, b.bytes);
    u64 miss = 0, first = 0, n = r.bytes / r.elem;
    for (u64 k = 0; k < n && !r.init; k++) if (!r.cells[k].wtg) { if (!miss++) first = k; }
    if (miss && !(res->status & 2)) finding("unwritten", 0, i, "%lu of %lu elements of output '%s' never written (first: %lu)", (unsigned long)miss, (unsigned long)n, r.name, (unsigned long)first);
  }
  for (u32 i = 1; i <= n_regions; i++) { Region& r = regions[i]; if (r.cells) munmap(r.cells, (r.bytes / r.elem + 1) * sizeof(Cell)); }
  memset(slot_of, 0, (arena_top / SLOT + 1) * sizeof(u16));
  // Every kernel's library has its own arena and stacks, each a mapping or thousands: hundreds of libraries would
  // exhaust what a process may map.
  munmap(arena, ARENA); arena = 0;
  munmap(stacks, MAXT * STACK); stacks = 0; n_stacks = 0;
  clock_gettime(CLOCK_MONOTONIC, &t1); res->seconds = (t1.tv_sec - t0.tv_sec) + 1e-9 * (t1.tv_nsec - t0.tv_nsec);
  return res->status;
}
}
