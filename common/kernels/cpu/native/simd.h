// Vectors of W floats and the dot-product step, for AVX2, AVX-512 and AVX-512 with BF16.
//
// A "unit" is 4 bytes along k: one float, or two bfloat16 (low half = even k). Kernels walk units, so that one code
// serves both dtypes: dot(acc, a, b) adds a unit's products for W output columns.
//
// Names: v<operation>, vf W floats, vi W 32-bit words. A suffix _n limits an operation to the first n lanes: loads fill
// the rest with zero, stores leave memory alone.
//   vkeep(x, n, other)    lanes < n of x, the rest of `other`
//   vfraction, vldexp_floor   x - floor(x); p * 2^floor(x)
//   transpose(r)          the W x W matrix of words r, in place
//   vpair(a, b, n)        rows of 2W bfloat16 (n valid) as pairs (a[d], b[d]), in an order of columns that costs one
//                         instruction; vunpair restores the columns' order in sums over such pairs
#pragma once
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#else
#error "the CPU executor needs AVX2 and FMA"
#endif

namespace baton {

// float32: a unit is one element.
struct F32 {
  using elem = float;
  static constexpr int PER_UNIT = 1;
  static constexpr bool CODES_ROWS = false;  // beside quantised weights: activations stay as they are
  struct B {
    vf v;
  };
  static inline B b_load(const uint32_t* p) { return {as_f(vload_u(p))}; }
  static inline B a_load(const uint32_t* p) { return {as_f(vset_u(*p))}; }
  static inline vf dot(vf acc, const B& a, const B& b) { return vfma(a.v, b.v, acc); }
  static inline void store(elem* p, vf x) { vstore(p, x); }
  static inline void store_n(elem* p, vf x, int n) { vstore_n(p, x, n); }
  static inline vf load_n(const elem* p, int n) { return vload_n(p, n); }
};

// bfloat16: a unit is a pair; products are summed in float32.
struct BF16 {
  using elem = uint16_t;
  static constexpr int PER_UNIT = 2;
  static constexpr bool CODES_ROWS = true;  // beside quantised weights: activations become int8
#if defined(__AVX512BF16__)
  struct B {
    vi v;
  };
  static inline B b_load(const uint32_t* p) { return {vload_u(p)}; }
  static inline B a_load(const uint32_t* p) { return {vset_u(*p)}; }
  static inline vf dot(vf acc, const B& a, const B& b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a.v, (__m512bh)b.v);
  }
#else
  struct B {
    vf even, odd;
  };
  static inline B expand(vi u) { return {as_f(vshl16(u)), as_f(vhigh16(u))}; }
  static inline B b_load(const uint32_t* p) { return expand(vload_u(p)); }
  static inline B a_load(const uint32_t* p) { return expand(vset_u(*p)); }
  static inline vf dot(vf acc, const B& a, const B& b) { return vfma(a.odd, b.odd, vfma(a.even, b.even, acc)); }
#endif
  static inline void store(elem* p, vf x) { vstore_bf16(p, x); }
  static inline void store_n(elem* p, vf x, int n) { vstore_bf16_n(p, x, n); }
  static inline vf load_n(const elem* p, int n) { return as_f(vshl16(vload_u16_n(p, n))); }
};

// 2^x. Minimax polynomials for [0, 1): relative error 3e-6 for bfloat16 (which keeps 2^-9), 6e-8 for float32.
template <class T>
static inline vf vexp2(vf x) {
  const vf f = vfraction(x);
  vf p;
  if constexpr (T::PER_UNIT == 2) {
    p = vfma(vset(0.013534166850149632f), f, vset(0.052011460065841675f));
    p = vfma(p, f, vset(0.2414427548646927f));
    p = vfma(p, f, vset(0.6930038332939148f));
    p = vfma(p, f, vset(1.0000026226043701f));
  } else {
    p = vfma(vset(0.00021702254889532924f), f, vset(0.0012439688434824347f));
    p = vfma(p, f, vset(0.009678840637207031f));
    p = vfma(p, f, vset(0.055483341217041016f));
    p = vfma(p, f, vset(0.24022983014583588f));
    p = vfma(p, f, vset(0.6931470036506653f));
    p = vfma(p, f, vset(1.0f));
  }
  return vldexp_floor(p, x);
}

static inline int at_most(int x, int limit) { return x < limit ? x : limit; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

}  // namespace baton
