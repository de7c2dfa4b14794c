// Metal Shading Language on top of clang's "C++ for OpenCL 2021" mode: the address spaces are real,
// so what Metal rejects (implicit or explicit address-space changes, `double`, writes to constant,
// uninitialised constants, ...) clang rejects. Used twice, unchanged: for the checking pass
// (-fsyntax-only) and, with MTL_EMULATE, for the x86-64 build that runtime.cpp executes.
// The text handed to clang has been through front.py (vector constructors, casts, literals,
// threadgroup variables); everything else is done here.
#pragma once

// ---------------------------------------------------------------- language
#define device __global
#define constant const __constant               // implies const, as in Metal
#define threadgroup __local
#define thread __private
#define kernel
#define half _Float16
#define atomic_int mtl_atomic_int             // OpenCL predeclares these names
#define atomic_uint mtl_atomic_uint
#define atomic_float mtl_atomic_float
#define atomic_ulong mtl_atomic_ulong
#define METAL_FUNC inline __attribute__((__always_inline__))
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t, ptrdiff_t;
typedef __bf16 bfloat;

#define MTL_V(T) typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); typedef T T##4 __attribute__((ext_vector_type(4)));
#define MTL_VN(T, N) typedef T N##2 __attribute__((ext_vector_type(2))); \
  typedef T N##3 __attribute__((ext_vector_type(3))); typedef T N##4 __attribute__((ext_vector_type(4)));
MTL_V(char) MTL_V(uchar) MTL_V(short) MTL_V(ushort) MTL_V(int) MTL_V(uint) MTL_V(long) MTL_V(ulong)
MTL_V(float) MTL_V(bfloat) MTL_VN(_Float16, half) MTL_VN(uchar, bool) // bool vectors: bytes; a comparison gives an int vector
// packed_*: same value type, alignment of the element (packed_*3 is three elements, not four)
#define MTL_P(T) typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T)))); \
  struct packed_##T##3 { T x, y, z; packed_##T##3() {} packed_##T##3(T a, T b, T c) : x(a), y(b), z(c) {} \
    packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {} operator T##3() const { return T##3{x, y, z}; } };
MTL_P(char) MTL_P(uchar) MTL_P(short) MTL_P(ushort) MTL_P(int) MTL_P(uint) MTL_P(float)

#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_SQRT2_F 1.41421356237309504880f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define MAXFLOAT FLT_MAX
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-5f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace metal {
template <typename T, int C, int R> struct matrix;   // not modelled; a name of ours must not hide behind it
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));

// ---------------------------------------------------------------- type traits
template <typename T, T v> struct integral_constant {
  static constexpr constant T value = v; using value_type = T; using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F> struct conditional { using type = T; };
template <typename T, typename F> struct conditional<false, T, F> { using type = F; };
template <bool B, typename T, typename F> using conditional_t = typename conditional<B, T, F>::type;
template <typename T> struct remove_reference { using type = T; };
#define MTL_RR(A) template <typename T> struct remove_reference<A T&> { using type = A T; }; \
  template <typename T> struct remove_reference<A T&&> { using type = A T; };
MTL_RR() MTL_RR(device) MTL_RR(constant) MTL_RR(threadgroup) MTL_RR(thread)
template <typename T> using remove_reference_t = typename remove_reference<T>::type;
template <typename T> struct remove_addrspace { using type = T; };
template <typename T> struct remove_addrspace<device T> { using type = T; };
template <typename T> struct remove_addrspace<constant T> { using type = T; };
template <typename T> struct remove_addrspace<threadgroup T> { using type = T; };
template <typename T> struct remove_addrspace<thread T> { using type = T; };
template <typename T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <typename T> struct remove_const { using type = T; };
template <typename T> struct remove_const<const T> { using type = T; };
template <typename T> struct remove_volatile { using type = T; };
template <typename T> struct remove_volatile<volatile T> { using type = T; };
template <typename T> struct remove_cv { using type = typename remove_volatile<typename remove_const<T>::type>::type; };
template <typename T> using remove_const_t = typename remove_const<T>::type;
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> using remove_cvref_t = remove_cv_t<remove_reference_t<T>>;
template <typename T, typename U> struct is_same : false_type {};
template <typename T> struct is_same<T, T> : true_type {};
template <typename T, typename U> constexpr constant bool is_same_v = is_same<T, U>::value;
template <typename A, typename B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <typename A, typename B> constexpr constant bool is_convertible_v = __is_convertible(A, B);
#define MTL_TRAIT(name, builtin) template <typename T> struct name : bool_constant<builtin(T)> {}; \
  template <typename T> constexpr constant bool name##_v = builtin(T);
MTL_TRAIT(is_integral, __is_integral) MTL_TRAIT(is_floating_point, __is_floating_point)
MTL_TRAIT(is_arithmetic, __is_arithmetic) MTL_TRAIT(is_signed, __is_signed) MTL_TRAIT(is_unsigned, __is_unsigned)
MTL_TRAIT(is_pointer, __is_pointer) MTL_TRAIT(is_enum, __is_enum) MTL_TRAIT(is_class, __is_class)
template <typename...> struct _disjunction : false_type {};
template <typename A, typename... R> struct _disjunction<A, R...> : conditional_t<A::value, true_type, _disjunction<R...>> {};
template <typename T> struct make_unsigned { using type = __make_unsigned(T); };
template <typename T> struct make_signed { using type = __make_signed(T); };
template <typename T> using make_unsigned_t = typename make_unsigned<T>::type;
template <typename T> using make_signed_t = typename make_signed<T>::type;
template <typename T, size_t N> struct array {
  T e[N];
  constexpr thread T& operator[](size_t i) thread { return e[i]; }
  constexpr const thread T& operator[](size_t i) const thread { return e[i]; }
  constexpr threadgroup T& operator[](size_t i) threadgroup { return e[i]; }
  constexpr device T& operator[](size_t i) device { return e[i]; }
  constexpr const constant T& operator[](size_t i) const constant { return e[i]; }
  constexpr size_t size() const { return N; }
};
template <typename T> using uniform = T;
template <typename T> constexpr T make_uniform(T x) { return x; }
struct os_log {
  constexpr os_log(const constant char*, const constant char*) {}
  template <typename... A> void log_debug(const constant char*, A...) const {}
};

template <typename T> struct numeric_limits {
  static constexpr T max() { return T(-1) < T(0) ? T((1ul << (sizeof(T) * 8 - 1)) - 1) : T(~T(0)); }
  static constexpr T min() { return T(-1) < T(0) ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
  static constexpr constant int digits = sizeof(T) * 8 - (T(-1) < T(0));
};
template <> struct numeric_limits<bool> { static constexpr bool max() { return true; } static constexpr bool min() { return false; } };
#define MTL_LIM(T, MAX, MIN, EPS, DIG) template <> struct numeric_limits<T> { \
  static constexpr T max() { return (T)MAX; } static constexpr T min() { return (T)MIN; } \
  static constexpr T lowest() { return (T)-MAX; } static constexpr T epsilon() { return (T)EPS; } \
  static constexpr T infinity() { return (T)__builtin_inff(); } static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  static constexpr constant int digits = DIG; };
MTL_LIM(float, 3.402823466e+38f, 1.175494351e-38f, 1.192092896e-07f, 24)
MTL_LIM(half, 65504.0f, 6.103515625e-5f, 9.765625e-4f, 11)
MTL_LIM(bfloat, 3.38953139e+38f, 1.175494351e-38f, 7.8125e-3f, 8)
} // namespace metal

// ---------------------------------------------------------------- conversions (targets of the rewriter)
namespace mtl {
using metal::vec;
template <typename T> struct traits { using elem = T; static constexpr constant int n = 0; };
template <typename T, int N> struct traits<T __attribute__((ext_vector_type(N)))> { using elem = T; static constexpr constant int n = N; };
template <typename T> constexpr constant bool scalar = __is_arithmetic(T) || metal::is_same_v<T, half> || metal::is_same_v<T, bfloat>;

template <typename E, typename F> constexpr E elem(F x) {            // explicit scalar conversion, incl. half <-> bfloat
  if constexpr ((metal::is_same_v<E, bfloat> && metal::is_same_v<F, half>) || (metal::is_same_v<E, half> && metal::is_same_v<F, bfloat>))
    return (E)(float)x;
  else return (E)x;
}
template <typename E, typename F> constexpr auto part(F x) {        // one argument of a vector constructor
  if constexpr (traits<F>::n == 0) return elem<E>(x);
  else if constexpr (metal::is_same_v<typename traits<F>::elem, E>) return x;
  else { vec<E, traits<F>::n> r; for (int i = 0; i < traits<F>::n; i++) r[i] = elem<E>(x[i]); return r; }
}
template <typename T> struct same_ { using type = T; };
template <typename T> using same = typename same_<T>::type;              // a parameter that takes no part in deduction

template <typename T, typename... A> constexpr T mk(A... a) {        // T(a...), value conversion for vectors
  if constexpr (traits<T>::n == 0) {
    if constexpr (scalar<T> && sizeof...(A) == 1) return (elem<T>(a), ...);
    else return T(a...);
  } else if constexpr (sizeof...(A) == 1 && ((traits<A>::n == 0) && ...)) {
    if constexpr ((scalar<A> && ...)) return (T)(elem<typename traits<T>::elem>(a), ...);
    else return (static_cast<T>(a), ...);                             // user conversion operator
  } else {
    if constexpr (sizeof...(A) == 0) return T{};
    else {
      static_assert(((traits<A>::n ? traits<A>::n : 1) + ...) == traits<T>::n, "vector constructor: wrong number of components");
      return T{part<typename traits<T>::elem>(a)...};
    }
  }
}
template <typename T, typename F> constexpr T cast(F x) { return mk<T>(x); }
template <typename T> struct cc { };                                  // (T)x  ->  mtl::cc<T>()->*x
template <typename T, typename F> constexpr T operator->*(cc<T>, F x) { return mk<T>(x); }
template <typename T> struct ccneg { };
template <typename T> constexpr ccneg<T> operator-(cc<T>) { return {}; }
template <typename T, typename F> constexpr auto operator->*(ccneg<T>, F x) { return -mk<T>(x); }

// threadgroup variables: `threadgroup T x[N];` -> `threadgroup T (&x)[N] = mtl::tg<T[N]>("x");`
extern "C" threadgroup void* mtl_rt_tg(size_t bytes, uint elem, const constant char* name, int line);
template <typename T> struct base { using type = T; };
template <typename T, size_t N> struct base<T[N]> { using type = typename base<T>::type; };
template <typename T> constexpr uint elem_size() {
  using B = typename base<T>::type; using E = typename traits<B>::elem;
  return scalar<E> ? sizeof(E) : 4;
}
template <typename T> inline threadgroup T& tg(const constant char* name, int line = __builtin_LINE()) {
  return *(threadgroup T*)mtl_rt_tg(sizeof(T), elem_size<T>(), name, line);
}
} // namespace mtl

template <typename T, typename F> constexpr T as_type(F x) {
  static_assert(sizeof(T) == sizeof(F), "as_type: sizes differ");
  return __builtin_bit_cast(T, x);
}

namespace metal {
using ::char2; using ::char3; using ::char4; using ::uchar2; using ::uchar3; using ::uchar4; using ::short2; using ::short3; using ::short4;
using ::ushort2; using ::ushort3; using ::ushort4; using ::int2; using ::int3; using ::int4; using ::uint2; using ::uint3; using ::uint4;
using ::long2; using ::long3; using ::long4; using ::ulong2; using ::ulong3; using ::ulong4; using ::float2; using ::float3; using ::float4;
using ::half2; using ::half3; using ::half4; using ::bfloat2; using ::bfloat3; using ::bfloat4; using ::bool2; using ::bool3; using ::bool4;

// ---------------------------------------------------------------- math
// Non-template overloads for float and half, as in Metal: max(half, float) and exp(int) are ambiguous.
extern "C" {
float acosf(float); float acoshf(float); float asinf(float); float asinhf(float); float atanf(float); float atanhf(float);
float atan2f(float, float); float ceilf(float); float cosf(float); float coshf(float); float expf(float); float exp2f(float);
float floorf(float); float logf(float); float log2f(float); float log10f(float); float rintf(float); float roundf(float);
float sinf(float); float sinhf(float); float tanf(float); float tanhf(float); float truncf(float); float fmodf(float, float);
float powf(float, float); float nextafterf(float, float); float ldexpf(float, int); float frexpf(float, int*); float modff(float, float*);
float fmaf(float, float, float); float exp10f(float);
}
}
namespace mtl {   // scalar float kernels of the math library
using namespace metal;
#define MTL_M1(name, expr) inline float name(float x) { return expr; }
MTL_M1(acos, acosf(x)) MTL_M1(acosh, acoshf(x)) MTL_M1(asin, asinf(x)) MTL_M1(asinh, asinhf(x)) MTL_M1(atan, atanf(x))
MTL_M1(atanh, atanhf(x)) MTL_M1(ceil, ceilf(x)) MTL_M1(cos, cosf(x)) MTL_M1(cosh, coshf(x)) MTL_M1(cospi, cosf(x * M_PI_F))
MTL_M1(exp, expf(x)) MTL_M1(exp2, exp2f(x)) MTL_M1(exp10, exp10f(x)) MTL_M1(fabs, __builtin_fabsf(x)) MTL_M1(floor, floorf(x))
MTL_M1(fract, x - floorf(x)) MTL_M1(log, logf(x)) MTL_M1(log2, log2f(x)) MTL_M1(log10, log10f(x)) MTL_M1(rint, rintf(x))
MTL_M1(round, roundf(x)) MTL_M1(rsqrt, 1.0f / __builtin_sqrtf(x)) MTL_M1(sin, sinf(x)) MTL_M1(sinh, sinhf(x)) MTL_M1(sinpi, sinf(x * M_PI_F))
MTL_M1(sqrt, __builtin_sqrtf(x)) MTL_M1(tan, tanf(x)) MTL_M1(tanh, tanhf(x)) MTL_M1(tanpi, tanf(x * M_PI_F)) MTL_M1(trunc, truncf(x))
MTL_M1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x) MTL_M1(saturate, x > 0 ? (x < 1 ? x : 1.0f) : 0.0f) MTL_M1(abs, __builtin_fabsf(x))
#define MTL_M2(name, expr) inline float name(float x, float y) { return expr; }
MTL_M2(atan2, atan2f(x, y)) MTL_M2(copysign, __builtin_copysignf(x, y)) MTL_M2(fdim, x > y ? x - y : 0.0f)
MTL_M2(fmax, __builtin_fmaxf(x, y)) MTL_M2(fmin, __builtin_fminf(x, y)) MTL_M2(max, __builtin_fmaxf(x, y)) MTL_M2(min, __builtin_fminf(x, y))
MTL_M2(fmod, fmodf(x, y)) MTL_M2(pow, powf(x, y)) MTL_M2(powr, powf(x, y)) MTL_M2(nextafter, nextafterf(x, y)) MTL_M2(divide, x / y)
MTL_M2(step, y < x ? 0.0f : 1.0f)
#define MTL_M3(name, expr) inline float name(float x, float y, float z) { return expr; }
MTL_M3(fma, fmaf(x, y, z)) MTL_M3(clamp, __builtin_fminf(__builtin_fmaxf(x, y), z)) MTL_M3(mix, x + (y - x) * z)
MTL_M3(max3, max(x, max(y, z))) MTL_M3(min3, min(x, min(y, z))) MTL_M3(median3, max(min(x, y), min(max(x, y), z)))
MTL_M3(fmax3, max(x, max(y, z))) MTL_M3(fmin3, min(x, min(y, z))) MTL_M3(fmedian3, median3(x, y, z))
inline float smoothstep3(float a, float b, float x) { float t = clamp((x - a) / (b - a), 0.0f, 1.0f); return t * t * (3.0f - 2.0f * t); }
MTL_M3(smoothstep, smoothstep3(x, y, z))
} // namespace mtl

#define MTL_LIST1(X) X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(ceil) X(cos) X(cosh) X(cospi) X(exp) X(exp2) X(exp10) X(fabs) \
  X(floor) X(fract) X(log) X(log2) X(log10) X(rint) X(round) X(rsqrt) X(sin) X(sinh) X(sinpi) X(sqrt) X(tan) X(tanh) X(tanpi) X(trunc) X(sign) X(saturate) X(abs)
#define MTL_LIST2(X) X(atan2) X(copysign) X(fdim) X(fmax) X(fmin) X(max) X(min) X(fmod) X(pow) X(powr) X(nextafter) X(divide) X(step)
#define MTL_LIST3(X) X(fma) X(clamp) X(mix) X(max3) X(min3) X(median3) X(fmax3) X(fmin3) X(fmedian3) X(smoothstep)
#define MTL_D1(f) inline float f(float x) { return mtl::f(x); } inline half f(half x) { return (half)mtl::f((float)x); } \
  template <int N> inline vec<float, N> f(vec<float, N> x) { vec<float, N> r; for (int i = 0; i < N; i++) r[i] = mtl::f(x[i]); return r; } \
  template <int N> inline vec<half, N> f(vec<half, N> x) { vec<half, N> r; for (int i = 0; i < N; i++) r[i] = (half)mtl::f((float)x[i]); return r; }
#define MTL_D2V(f, T) template <int N> inline vec<T, N> f(vec<T, N> x, vec<T, N> y) { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = (T)mtl::f((float)x[i], (float)y[i]); return r; } \
  template <int N> inline vec<T, N> f(vec<T, N> x, T y) { return f(x, (vec<T, N>)y); } template <int N> inline vec<T, N> f(T x, vec<T, N> y) { return f((vec<T, N>)x, y); }
#define MTL_D2(f) inline float f(float x, float y) { return mtl::f(x, y); } inline half f(half x, half y) { return (half)mtl::f((float)x, (float)y); } MTL_D2V(f, float) MTL_D2V(f, half)
#define MTL_D3V(f, T) template <int N> inline vec<T, N> f(vec<T, N> x, vec<T, N> y, vec<T, N> z) { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = (T)mtl::f((float)x[i], (float)y[i], (float)z[i]); return r; } \
  template <int N> inline vec<T, N> f(vec<T, N> x, T y, T z) { return f(x, (vec<T, N>)y, (vec<T, N>)z); } template <int N> inline vec<T, N> f(vec<T, N> x, vec<T, N> y, T z) { return f(x, y, (vec<T, N>)z); }
#define MTL_D3(f) inline float f(float x, float y, float z) { return mtl::f(x, y, z); } inline half f(half x, half y, half z) { return (half)mtl::f((float)x, (float)y, (float)z); } MTL_D3V(f, float) MTL_D3V(f, half)
namespace metal {
MTL_LIST1(MTL_D1) MTL_LIST2(MTL_D2) MTL_LIST3(MTL_D3)
inline float ldexp(float x, int k) { return ldexpf(x, k); }
inline half ldexp(half x, int k) { return (half)ldexpf((float)x, k); }
inline float frexp(float x, thread int& e) { int t; float r = frexpf(x, &t); e = t; return r; }
inline float modf(float x, thread float& i) { i = truncf(x); return x - i; }
inline float sincos(float x, thread float& c) { c = cosf(x); return sinf(x); }
namespace fast { MTL_LIST1(MTL_D1) MTL_LIST2(MTL_D2) MTL_LIST3(MTL_D3) inline float sincos(float x, thread float& c) { c = cosf(x); return sinf(x); } }
namespace precise { MTL_LIST1(MTL_D1) MTL_LIST2(MTL_D2) MTL_LIST3(MTL_D3) inline float sincos(float x, thread float& c) { c = cosf(x); return sinf(x); } }

#define MTL_INT(T) inline T abs(T x) { return x < 0 ? (T)-x : x; } inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; } \
  inline T clamp(T x, T a, T b) { return min(max(x, a), b); } inline T mulhi(T a, T b) { return (T)(((__int128)a * (__int128)b) >> (8 * sizeof(T))); } \
  inline T absdiff(T a, T b) { return a < b ? (T)(b - a) : (T)(a - b); } \
  template <int N> inline vec<T, N> min(vec<T, N> a, vec<T, N> b) { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = min(a[i], b[i]); return r; } \
  template <int N> inline vec<T, N> max(vec<T, N> a, vec<T, N> b) { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = max(a[i], b[i]); return r; } \
  template <int N> inline vec<T, N> clamp(vec<T, N> x, T a, T b) { return min(max(x, (vec<T, N>)a), (vec<T, N>)b); } \
  inline T popcount(T x) { return (T)__builtin_popcountll((__make_unsigned(T))x); } \
  inline T clz(T x) { return x ? (T)(__builtin_clzll((__make_unsigned(T))x) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T)); } \
  inline T ctz(T x) { return x ? (T)__builtin_ctzll((__make_unsigned(T))x) : (T)(8 * sizeof(T)); } \
  inline T rotate(T x, T n) { using U = __make_unsigned(T); uint b = 8 * sizeof(T), k = (uint)n & (b - 1); return k ? (T)(((U)x << k) | ((U)x >> (b - k))) : x; } \
  inline T extract_bits(T x, uint o, uint n) { if (!n) return 0; using U = __make_unsigned(T); uint b = 8 * sizeof(T); U t = (U)x << (b - n - o); return (T)((T)t >> (b - n)); }
MTL_INT(char) MTL_INT(uchar) MTL_INT(short) MTL_INT(ushort) MTL_INT(int) MTL_INT(uint) MTL_INT(long) MTL_INT(ulong)
inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
inline int mul24(int a, int b) { return a * b; }
inline int mad24(int a, int b, int c) { return a * b + c; }

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isnormal(float x) { return __builtin_isnormal(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool isnan(half x) { return x != x; }
inline bool isinf(half x) { return __builtin_isinf((float)x); }
inline bool isfinite(half x) { return __builtin_isfinite((float)x); }
inline bool signbit(half x) { return __builtin_signbit((float)x); }
inline bool isnan(bfloat x) { return x != x; }
inline bool isinf(bfloat x) { return __builtin_isinf((float)x); }
inline bool isfinite(bfloat x) { return __builtin_isfinite((float)x); }
inline bool signbit(bfloat x) { return __builtin_signbit((float)x); }
template <typename T, enable_if_t<mtl::scalar<T>, bool> = true> inline T select(T a, T b, bool c) { return c ? b : a; }
template <typename T, int N, typename B> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<B, N> c) { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i]; return r; }
inline bool any(bool x) { return x; }
inline bool all(bool x) { return x; }
template <typename T, int N> inline bool any(vec<T, N> v) { bool r = false; for (int i = 0; i < N; i++) r |= v[i] != 0; return r; }
template <typename T, int N> inline bool all(vec<T, N> v) { bool r = true; for (int i = 0; i < N; i++) r &= v[i] != 0; return r; }
template <typename T, int N> inline T dot(vec<T, N> a, vec<T, N> b) { T s = a[0] * b[0]; for (int i = 1; i < N; i++) s += a[i] * b[i]; return s; }
template <typename T, int N> inline T length_squared(vec<T, N> a) { return dot(a, a); }
template <typename T, int N> inline T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <typename T, int N> inline vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <typename T> inline vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }

// ---------------------------------------------------------------- synchronisation, SIMD-groups, atomics
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
inline mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((int)a & (int)b); }
enum memory_order { memory_order_relaxed, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device, thread_scope_system };
template <typename T> struct atomic { T v; };
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float; typedef atomic<ulong> atomic_ulong;
struct simd_vote { ulong m; simd_vote(ulong v) : m(v) {} simd_vote() : m(0) {} bool all() const { return m == 0xffffffffu; } bool any() const { return m != 0; } explicit operator ulong() const { return m; } };

void threadgroup_barrier(mem_flags f, int line = __builtin_LINE());
void simdgroup_barrier(mem_flags f, int line = __builtin_LINE());
inline void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

// Metal has no simd_* for bool, bfloat and 64-bit integers (MLX adds its own overloads)
template <typename T> constexpr constant bool simd_ok = mtl::scalar<typename mtl::traits<T>::elem> && sizeof(typename mtl::traits<T>::elem) <= 4 &&
  !is_same_v<typename mtl::traits<T>::elem, bool> && !is_same_v<typename mtl::traits<T>::elem, bfloat>;
#define MTL_T template <typename T, enable_if_t<simd_ok<T>, bool> = true>
#define MTL_L int line = __builtin_LINE()
// ... and an argument of such a type must not slip into one of those overloads through a conversion
#define MTL_DEL(f) template <typename T, enable_if_t<!simd_ok<T> && !is_same_v<T, bfloat>, bool> = true> T f(T, MTL_L) = delete;
MTL_DEL(simd_sum) MTL_DEL(simd_product) MTL_DEL(simd_max) MTL_DEL(simd_min) MTL_DEL(simd_prefix_inclusive_sum) MTL_DEL(simd_prefix_exclusive_sum)
#define MTL_DEL2(f) template <typename T, enable_if_t<!simd_ok<T> && !is_same_v<T, bfloat> && !is_same_v<T, bool> && !is_same_v<T, ulong> && !is_same_v<T, long>, bool> = true> T f(T, ushort, MTL_L) = delete;
MTL_DEL2(simd_broadcast) MTL_DEL2(simd_shuffle) MTL_DEL2(simd_shuffle_xor) MTL_DEL2(simd_shuffle_up) MTL_DEL2(simd_shuffle_down)
MTL_T T simd_sum(T, MTL_L);      MTL_T T simd_product(T, MTL_L);  MTL_T T simd_max(T, MTL_L);   MTL_T T simd_min(T, MTL_L);
MTL_T T simd_and(T, MTL_L);      MTL_T T simd_or(T, MTL_L);       MTL_T T simd_xor(T, MTL_L);
MTL_T T simd_prefix_inclusive_sum(T, MTL_L);      MTL_T T simd_prefix_exclusive_sum(T, MTL_L);
MTL_T T simd_prefix_inclusive_product(T, MTL_L);  MTL_T T simd_prefix_exclusive_product(T, MTL_L);
MTL_T T simd_broadcast(T, ushort lane, MTL_L);    MTL_T T simd_broadcast_first(T, MTL_L);
MTL_T T simd_shuffle(T, ushort lane, MTL_L);      MTL_T T simd_shuffle_xor(T, ushort mask, MTL_L);
MTL_T T simd_shuffle_up(T, ushort d, MTL_L);      MTL_T T simd_shuffle_down(T, ushort d, MTL_L);
MTL_T T simd_shuffle_rotate_up(T, ushort d, MTL_L); MTL_T T simd_shuffle_rotate_down(T, ushort d, MTL_L);
MTL_T T simd_shuffle_and_fill_up(T, T fill, ushort d, MTL_L);    MTL_T T simd_shuffle_and_fill_up(T, T fill, ushort d, ushort modulo, MTL_L);
MTL_T T simd_shuffle_and_fill_down(T, T fill, ushort d, MTL_L);  MTL_T T simd_shuffle_and_fill_down(T, T fill, ushort d, ushort modulo, MTL_L);
MTL_T T quad_sum(T, MTL_L);      MTL_T T quad_product(T, MTL_L);  MTL_T T quad_max(T, MTL_L);   MTL_T T quad_min(T, MTL_L);
MTL_T T quad_broadcast(T, ushort lane, MTL_L);    MTL_T T quad_shuffle(T, ushort lane, MTL_L);  MTL_T T quad_shuffle_xor(T, ushort mask, MTL_L);
MTL_T T quad_shuffle_up(T, ushort d, MTL_L);      MTL_T T quad_shuffle_down(T, ushort d, MTL_L);
bool simd_all(bool, MTL_L); bool simd_any(bool, MTL_L); simd_vote simd_ballot(bool, MTL_L); simd_vote simd_active_threads_mask(MTL_L);
bool simd_is_first(MTL_L); bool quad_all(bool, MTL_L); bool quad_any(bool, MTL_L);

// 8x8 matrices: lane l holds elements (row, col), (row, col+1), the layout Apple GPUs use
template <typename T, int C = 8, int R = 8> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "simdgroup_matrix: half, bfloat or float");
  vec<T, 2> e;
  simdgroup_matrix() {}
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements() thread { return e; }
  const thread vec<T, 2>& thread_elements() const thread { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v, MTL_L);
#define MTL_MLS(AS) \
  template <typename T> void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const AS T* src, ulong ld = 8, ulong2 origin = 0, bool transpose = false, MTL_L); \
  template <typename T> void simdgroup_store(simdgroup_matrix<T, 8, 8> s, AS T* dst, ulong ld = 8, ulong2 origin = 0, bool transpose = false, MTL_L);
MTL_MLS(device) MTL_MLS(threadgroup)
template <typename D, typename A, typename B> void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, MTL_L);
template <typename D, typename A, typename B, typename C> void simdgroup_multiply_accumulate(
  thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MTL_L);

template <typename T> constexpr constant bool atomic_ok = is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> || is_same_v<T, ulong>;
#define MTL_AT(AS) \
  template <typename T> T atomic_load_explicit(const volatile AS atomic<T>* p, memory_order, MTL_L); \
  template <typename T> void atomic_store_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_exchange_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_add_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_sub_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_min_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_max_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_and_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_or_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> T atomic_fetch_xor_explicit(volatile AS atomic<T>* p, mtl::same<T> v, memory_order, MTL_L); \
  template <typename T> bool atomic_compare_exchange_weak_explicit(volatile AS atomic<T>* p, thread T* expected, mtl::same<T> v, memory_order, memory_order, MTL_L);
MTL_AT(device) MTL_AT(threadgroup)
} // namespace metal

// ---------------------------------------------------------------- compiler internals that MLX's bf16_math.h calls
#define MTL_I1(f) inline float __metal_##f(float x, bool) { return mtl::f(x); }
#define MTL_I2(f) inline float __metal_##f(float x, float y, bool) { return mtl::f(x, y); }
#define MTL_I3(f) inline float __metal_##f(float x, float y, float z, bool) { return mtl::f(x, y, z); }
MTL_LIST1(MTL_I1) MTL_LIST2(MTL_I2) MTL_LIST3(MTL_I3)
inline float __metal_fma(float x, float y, float z) { return mtl::fma(x, y, z); }
inline float __metal_nextafter(float x, float y) { return mtl::nextafter(x, y); }
inline float __metal_ldexp(float x, int k, bool) { return metal::ldexpf(x, k); }
inline float __metal_frexp(float x, thread int* e) { int t; float r = metal::frexpf(x, &t); *e = t; return r; }
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
#define MTL_IS1(f) template <typename T> inline T __metal_##f(T x, int line = __builtin_LINE()) { return metal::f(x, line); }
#define MTL_IS2(f) template <typename T> inline T __metal_##f(T x, ushort y, int line = __builtin_LINE()) { return metal::f(x, y, line); }
#define MTL_IS4(f) template <typename T> inline T __metal_##f(T x, T y, ushort d, ushort m, int line = __builtin_LINE()) { return metal::f(x, y, d, m, line); }
MTL_IS1(simd_sum) MTL_IS1(simd_product) MTL_IS1(simd_max) MTL_IS1(simd_min) MTL_IS1(simd_prefix_inclusive_sum) MTL_IS1(simd_prefix_exclusive_sum)
MTL_IS1(simd_prefix_inclusive_product) MTL_IS1(simd_prefix_exclusive_product)
inline float __metal_simd_xor(float x) { return x; }
MTL_IS2(simd_broadcast) MTL_IS2(simd_shuffle) MTL_IS2(simd_shuffle_xor) MTL_IS2(simd_shuffle_up) MTL_IS2(simd_shuffle_down)
MTL_IS2(simd_shuffle_rotate_up) MTL_IS2(simd_shuffle_rotate_down) MTL_IS4(simd_shuffle_and_fill_up) MTL_IS4(simd_shuffle_and_fill_down)

#ifdef MTL_EMULATE
#include "collectives.h"
#endif
// identifiers that are ordinary names in Metal but keywords in OpenCL
#define local mtl_name_local
#define global mtl_name_global
#define generic mtl_name_generic
#define pipe mtl_name_pipe
