// Definitions of what language.h only declares: barriers, SIMD-group operations, 8x8 matrices,
// atomics, and the glue that calls a kernel with the runtime's buffers. Every collective operation is
// a rendezvous in runtime.cpp: the lanes deposit a value in a slot, the last one wakes the others.
#pragma once

namespace mtl {
struct exchange {                          // shared with runtime.cpp
  unsigned char slot[32][64];              // what each lane deposited
  unsigned char result[64];                // filled by the first lane that resumes
  unsigned char order[32];                 // participating lanes, in the order a reduction adds them
  uint count, mask, done, lane_base;       // number of lanes, their mask, result valid, first lane of a quad
};
#define MTL_RT __attribute__((convergent, nomerge))
extern "C" {
MTL_RT void mtl_rt_barrier(int scope, int flags, int line);
MTL_RT __generic exchange* mtl_rt_simd(const __generic void* in, uint bytes, const __constant char* op, int line, int quad);
uint mtl_rt_lane();
void mtl_rt_lane_error(const __constant char* op, int line, uint lane);
void mtl_rt_atomic(const __generic volatile void* p, uint bytes, int write, int line);
}
#define MTL_NS __attribute__((no_sanitize("thread"), noinline))
#define MTL_IN __attribute__((always_inline)) inline

template <typename T> MTL_IN T at(const __generic exchange* x, uint lane) { return *(const __generic T*)x->slot[lane]; }

struct op_sum { template <typename T> static T f(T a, T b) { return a + b; } };
struct op_mul { template <typename T> static T f(T a, T b) { return a * b; } };
struct op_max { template <typename T> static T f(T a, T b) { return metal::max(a, b); } };
struct op_min { template <typename T> static T f(T a, T b) { return metal::min(a, b); } };
struct op_and { template <typename T> static T f(T a, T b) { return a & b; } };
struct op_or { template <typename T> static T f(T a, T b) { return a | b; } };
struct op_xor { template <typename T> static T f(T a, T b) { return a ^ b; } };

template <typename Op, typename T> MTL_NS void reduce(__generic exchange* x) {   // pairwise tree over x->order
  T v[32]; uint n = x->count;
  for (uint i = 0; i < n; i++) v[i] = at<T>(x, x->order[i]);
  for (uint s = 1; s < n; s *= 2) for (uint i = 0; i + s < n; i += 2 * s) v[i] = Op::f(v[i], v[i + s]);
  *(__generic T*)x->result = v[0]; x->done = 1;
}
template <typename Op, typename T> MTL_IN T all_reduce(T v, const __constant char* name, int line, int quad = 0) {
  auto x = mtl_rt_simd(&v, sizeof(T), name, line, quad);
  if (!x->done) reduce<Op, T>(x);
  return *(__generic T*)x->result;
}
template <typename Op, typename T> MTL_IN T scan(T v, T id, bool inclusive, const __constant char* name, int line) {
  auto x = mtl_rt_simd(&v, sizeof(T), name, line, 0);
  T r = id; uint me = mtl_rt_lane();
  for (uint i = 0; i < me + inclusive; i++) if (x->mask >> i & 1) r = Op::f(r, at<T>(x, i));
  return r;
}
template <typename T> MTL_IN T from_lane(T v, uint lane, const __constant char* name, int line, int quad = 0) {
  auto x = mtl_rt_simd(&v, sizeof(T), name, line, quad);
  lane += quad ? x->lane_base : 0;
  if (lane > 31 || !(x->mask >> lane & 1)) { mtl_rt_lane_error(name, line, lane); return v; }
  return at<T>(x, lane);
}
template <typename T> MTL_IN T from_lane_or(T v, int lane, T other, const __constant char* name, int line) {
  auto x = mtl_rt_simd(&v, sizeof(T), name, line, 0);
  if (lane < 0 || lane > 31 || !(x->mask >> lane & 1)) return other;
  return at<T>(x, lane);
}
} // namespace mtl

namespace metal {
MTL_IN void threadgroup_barrier(mem_flags f, int line) { mtl::mtl_rt_barrier(1, (int)f, line); }
MTL_IN void simdgroup_barrier(mem_flags f, int line) { mtl::mtl_rt_barrier(0, (int)f, line); }
#define MTL_TD template <typename T, enable_if_t<simd_ok<T>, bool>> MTL_IN
#define MTL_RED(name, op) MTL_TD T simd_##name(T v, int l) { return mtl::all_reduce<mtl::op>(v, "simd_" #name, l); }
MTL_RED(sum, op_sum) MTL_RED(product, op_mul) MTL_RED(max, op_max) MTL_RED(min, op_min) MTL_RED(and, op_and) MTL_RED(or, op_or) MTL_RED(xor, op_xor)
MTL_TD T simd_prefix_inclusive_sum(T v, int l) { return mtl::scan<mtl::op_sum>(v, (T)0, true, "simd_prefix_inclusive_sum", l); }
MTL_TD T simd_prefix_exclusive_sum(T v, int l) { return mtl::scan<mtl::op_sum>(v, (T)0, false, "simd_prefix_exclusive_sum", l); }
MTL_TD T simd_prefix_inclusive_product(T v, int l) { return mtl::scan<mtl::op_mul>(v, (T)1, true, "simd_prefix_inclusive_product", l); }
MTL_TD T simd_prefix_exclusive_product(T v, int l) { return mtl::scan<mtl::op_mul>(v, (T)1, false, "simd_prefix_exclusive_product", l); }
MTL_TD T simd_broadcast(T v, ushort n, int l) { return mtl::from_lane(v, n, "simd_broadcast", l); }
MTL_TD T simd_broadcast_first(T v, int l) { auto x = mtl::mtl_rt_simd(&v, sizeof(T), "simd_broadcast_first", l, 0); return mtl::at<T>(x, __builtin_ctz(x->mask)); }
MTL_TD T simd_shuffle(T v, ushort n, int l) { return mtl::from_lane(v, n, "simd_shuffle", l); }
MTL_TD T simd_shuffle_xor(T v, ushort m, int l) { return mtl::from_lane(v, mtl::mtl_rt_lane() ^ m, "simd_shuffle_xor", l); }
MTL_TD T simd_shuffle_up(T v, ushort d, int l) { return mtl::from_lane_or(v, (int)mtl::mtl_rt_lane() - d, v, "simd_shuffle_up", l); }
MTL_TD T simd_shuffle_down(T v, ushort d, int l) { return mtl::from_lane_or(v, (int)mtl::mtl_rt_lane() + d, v, "simd_shuffle_down", l); }
MTL_TD T simd_shuffle_rotate_up(T v, ushort d, int l) { return mtl::from_lane(v, (mtl::mtl_rt_lane() - d) & 31, "simd_shuffle_rotate_up", l); }
MTL_TD T simd_shuffle_rotate_down(T v, ushort d, int l) { return mtl::from_lane(v, (mtl::mtl_rt_lane() + d) & 31, "simd_shuffle_rotate_down", l); }
// fill: lane i of a group of `modulo` lanes takes data[i - d], or the last d lanes of `filling` when i < d (up)
MTL_TD T simd_shuffle_and_fill_up(T v, T fill, ushort d, ushort m, int l) {
  struct two { T v, f; }; two t; t.v = v; t.f = fill;
  auto x = mtl::mtl_rt_simd(&t, sizeof(t), "simd_shuffle_and_fill_up", l, 0);
  int me = mtl::mtl_rt_lane(), g = me / m * m, i = me - g;
  auto s = (const __generic two*)x->slot[i >= d ? me - d : g + m - d + i];
  return i >= d ? s->v : s->f;
}
MTL_TD T simd_shuffle_and_fill_down(T v, T fill, ushort d, ushort m, int l) {
  struct two { T v, f; }; two t; t.v = v; t.f = fill;
  auto x = mtl::mtl_rt_simd(&t, sizeof(t), "simd_shuffle_and_fill_down", l, 0);
  int me = mtl::mtl_rt_lane(), g = me / m * m, i = me - g;
  auto s = (const __generic two*)x->slot[i + d < m ? me + d : g + i + d - m];
  return i + d < m ? s->v : s->f;
}
MTL_TD T simd_shuffle_and_fill_up(T v, T fill, ushort d, int l) { return simd_shuffle_and_fill_up(v, fill, d, (ushort)32, l); }
MTL_TD T simd_shuffle_and_fill_down(T v, T fill, ushort d, int l) { return simd_shuffle_and_fill_down(v, fill, d, (ushort)32, l); }
#define MTL_QRED(name, op) MTL_TD T quad_##name(T v, int l) { return mtl::all_reduce<mtl::op>(v, "quad_" #name, l, 1); }
MTL_QRED(sum, op_sum) MTL_QRED(product, op_mul) MTL_QRED(max, op_max) MTL_QRED(min, op_min)
MTL_TD T quad_broadcast(T v, ushort n, int l) { return mtl::from_lane(v, n, "quad_broadcast", l, 1); }
MTL_TD T quad_shuffle(T v, ushort n, int l) { return mtl::from_lane(v, n, "quad_shuffle", l, 1); }
MTL_TD T quad_shuffle_xor(T v, ushort m, int l) { return mtl::from_lane(v, (mtl::mtl_rt_lane() & 3) ^ m, "quad_shuffle_xor", l, 1); }
MTL_TD T quad_shuffle_up(T v, ushort d, int l) { int i = (int)(mtl::mtl_rt_lane() & 3) - d; return mtl::from_lane(v, i < 0 ? i + d : i, "quad_shuffle_up", l, 1); }
MTL_TD T quad_shuffle_down(T v, ushort d, int l) { int i = (int)(mtl::mtl_rt_lane() & 3) + d; return mtl::from_lane(v, i > 3 ? i - d : i, "quad_shuffle_down", l, 1); }
MTL_IN ulong mtl_votes(bool b, const __constant char* n, int l, int quad) {
  uint v = b; auto x = mtl::mtl_rt_simd(&v, 4, n, l, quad); ulong m = 0;
  for (uint i = 0; i < 32; i++) if (x->mask >> i & 1) m |= (ulong)mtl::at<uint>(x, i) << i;
  return m | (ulong)x->mask << 32;
}
MTL_IN bool simd_all(bool b, int l) { ulong m = mtl_votes(b, "simd_all", l, 0); return (uint)m == (uint)(m >> 32); }
MTL_IN bool simd_any(bool b, int l) { return (uint)mtl_votes(b, "simd_any", l, 0) != 0; }
MTL_IN bool quad_all(bool b, int l) { ulong m = mtl_votes(b, "quad_all", l, 1); return (uint)m == (uint)(m >> 32); }
MTL_IN bool quad_any(bool b, int l) { return (uint)mtl_votes(b, "quad_any", l, 1) != 0; }
MTL_IN simd_vote simd_ballot(bool b, int l) { return simd_vote(mtl_votes(b, "simd_ballot", l, 0) & 0xffffffffu); }
MTL_IN simd_vote simd_active_threads_mask(int l) { return simd_vote(mtl_votes(true, "simd_active_threads_mask", l, 0) & 0xffffffffu); }
MTL_IN bool simd_is_first(int l) { return mtl::mtl_rt_lane() == (uint)__builtin_ctz((uint)mtl_votes(true, "simd_is_first", l, 0)); }

// ---- 8x8 matrices
MTL_IN uint mtl_row(uint l) { return (l / 4 & 4) + l / 2 % 4; }
MTL_IN uint mtl_col(uint l) { return (l / 4 & 2) * 2 + l % 2 * 2; }
template <typename T, int C, int R> simdgroup_matrix<T, C, R>::simdgroup_matrix(T d) {
  uint l = mtl::mtl_rt_lane(), r = mtl_row(l), c = mtl_col(l);
  e = vec<T, 2>{r == c ? d : (T)0.0f, r == c + 1 ? d : (T)0.0f};
}
template <typename T, int C, int R> MTL_IN simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v, int l) {
  mtl::mtl_rt_simd(&v, sizeof(T), "make_filled_simdgroup_matrix", l, 0);
  simdgroup_matrix<T, C, R> m; m.e = vec<T, 2>{v, v}; return m;
}
#define MTL_MLD(AS) \
  template <typename T> MTL_IN void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const AS T* p, ulong ld, ulong2 o, bool t, int l) { \
    mtl::mtl_rt_simd(&ld, sizeof(ld), "simdgroup_load", l, 0); \
    uint n = mtl::mtl_rt_lane(); ulong r = mtl_row(n), c = mtl_col(n); p += o.y * ld + o.x; \
    d.e = t ? vec<T, 2>{p[c * ld + r], p[(c + 1) * ld + r]} : vec<T, 2>{p[r * ld + c], p[r * ld + c + 1]}; } \
  template <typename T> MTL_IN void simdgroup_store(simdgroup_matrix<T, 8, 8> s, AS T* p, ulong ld, ulong2 o, bool t, int l) { \
    mtl::mtl_rt_simd(&ld, sizeof(ld), "simdgroup_store", l, 0); \
    uint n = mtl::mtl_rt_lane(); ulong r = mtl_row(n), c = mtl_col(n); p += o.y * ld + o.x; \
    if (t) { p[c * ld + r] = s.e.x; p[(c + 1) * ld + r] = s.e.y; } else { p[r * ld + c] = s.e.x; p[r * ld + c + 1] = s.e.y; } }
MTL_MLD(device) MTL_MLD(threadgroup)
template <typename A, typename B, typename C> struct mtl_abc { vec<A, 2> a; vec<B, 2> b; vec<C, 2> c; };
template <typename D, typename A, typename B, typename C> MTL_NS vec<D, 2> mtl_mma(const __generic mtl::exchange* x, uint l) {
  using abc = mtl_abc<A, B, C>;
  float s[2]; uint row = mtl_row(l), col = mtl_col(l);
  auto lane_of = [](uint r, uint c) { return (r & 4) * 4 + (c & 4) * 2 + (r & 3) * 2 + (c & 2) / 2; };
  for (uint j = 0; j < 2; j++) {
    s[j] = (float)((const __generic abc*)x->slot[l])->c[j];
    for (uint k = 0; k < 8; k++)
      s[j] += (float)((const __generic abc*)x->slot[lane_of(row, k)])->a[k & 1] * (float)((const __generic abc*)x->slot[lane_of(k, col + j)])->b[(col + j) & 1];
  }
  return vec<D, 2>{(D)s[0], (D)s[1]};
}
template <typename D, typename A, typename B, typename C> MTL_IN void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, int l) {
  mtl_abc<A, B, C> t; t.a = a.e; t.b = b.e; t.c = c.e;
  auto x = mtl::mtl_rt_simd(&t, sizeof(t), "simdgroup_multiply_accumulate", l, 0);
  d.e = mtl_mma<D, A, B, C>(x, mtl::mtl_rt_lane());
}
template <typename D, typename A, typename B> MTL_IN void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, int l) {
  simdgroup_matrix<D, 8, 8> z; z.e = vec<D, 2>{(D)0.0f, (D)0.0f};
  simdgroup_multiply_accumulate(d, a, b, z, l);
}

// ---- atomics: one OS thread runs all fibers, so plain accesses are atomic; the runtime is told about them
#define MTL_RMW(name, AS, expr) template <typename T> MTL_NS T atomic_##name##_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, int l) { \
  mtl::mtl_rt_atomic(p, sizeof(T), 1, l); T o = p->v; p->v = (T)(expr); return o; }
#define MTL_ATD(AS) \
  template <typename T> MTL_NS T atomic_load_explicit(const volatile AS atomic<T>* p, memory_order, int l) { mtl::mtl_rt_atomic(p, sizeof(T), 0, l); return p->v; } \
  template <typename T> MTL_NS void atomic_store_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, int l) { mtl::mtl_rt_atomic(p, sizeof(T), 2, l); p->v = v; } \
  MTL_RMW(exchange, AS, v) MTL_RMW(fetch_add, AS, o + v) MTL_RMW(fetch_sub, AS, o - v) MTL_RMW(fetch_min, AS, v < o ? v : o) MTL_RMW(fetch_max, AS, o < v ? v : o) \
  MTL_RMW(fetch_and, AS, o & v) MTL_RMW(fetch_or, AS, o | v) MTL_RMW(fetch_xor, AS, o ^ v) \
  template <typename T> MTL_NS bool atomic_compare_exchange_weak_explicit(volatile AS atomic<T>* p, thread T* e, mtl::same<T> v, memory_order, memory_order, int l) { \
    mtl::mtl_rt_atomic(p, sizeof(T), 1, l); T o = p->v; if (o == *e) { p->v = v; return true; } *e = o; return false; }
MTL_ATD(device) MTL_ATD(threadgroup)
} // namespace metal

// ---------------------------------------------------------------- calling a kernel
namespace mtl {
struct thread_info {                       // filled by runtime.cpp for every thread
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  uint threads_per_grid[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3], threadgroups_per_grid[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
  uint dispatch_simdgroups_per_threadgroup, thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
};
struct buf {                               // converts to whatever pointer or reference the parameter wants
  ulong a;
  template <typename P> operator device P*() const { return (device P*)a; }
  template <typename P> operator __constant P*() const { return (__constant P*)a; }
  template <typename P> operator threadgroup P*() const { return (threadgroup P*)a; }
  template <typename P> operator device P&() const { return *(device P*)a; }
  template <typename P> operator __constant P&() const { return *(__constant P*)a; }
};
struct attr3 {
  const __generic uint* v;
  operator uint3() const { return uint3{v[0], v[1], v[2]}; }
  operator uint2() const { return uint2{v[0], v[1]}; }
  operator ushort3() const { return ushort3{(ushort)v[0], (ushort)v[1], (ushort)v[2]}; }
  operator ushort2() const { return ushort2{(ushort)v[0], (ushort)v[1]}; }
  template <typename T, metal::enable_if_t<metal::is_integral_v<T>, bool> = true> operator T() const { return (T)v[0]; }
};
} // namespace mtl
