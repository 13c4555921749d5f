// Vectors of W floats and the dot-product step, for AVX2, AVX-512 and AVX-512 with BF16.
//
// A "unit" is 4 bytes along k: one float, or two bfloat16 (low half = even k). Kernels walk units, so that one code
// serves both dtypes: dot(acc, a, b) adds a unit's products, even k before odd, for W output columns.
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace baton {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
static inline __mmask16 lanes(int n) { return n >= 16 ? 0xffff : (__mmask16)((1u << (n < 0 ? 0 : n)) - 1); }
static inline vf vzero() { return _mm512_setzero_ps(); }
static inline vf vset(float x) { return _mm512_set1_ps(x); }
static inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
static inline vf vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
static inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline void vstore_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
static inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vnfma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
static inline float vsum(vf x) { return _mm512_reduce_add_ps(x); }
static inline float vfirst(vf x) { return _mm512_cvtss_f32(x); }
static inline float vhmax(vf x) { return _mm512_reduce_max_ps(x); }
static inline vf vkeep(vf x, int n, vf other) { return _mm512_mask_blend_ps(lanes(n), other, x); }  // lanes < n: x
static inline vf vfraction(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline vf vldexp_floor(vf p, vf x) { return _mm512_scalef_ps(p, x); }  // p * 2^floor(x)
static inline vi vload_u(const uint32_t* p) { return _mm512_loadu_si512(p); }
static inline vi vload_u_n(const uint32_t* p, int n) { return _mm512_maskz_loadu_epi32(lanes(n), p); }
static inline void vstore_u(uint32_t* p, vi x) { _mm512_storeu_si512(p, x); }
static inline void vstore_u_n(uint32_t* p, vi x, int n) { _mm512_mask_storeu_epi32(p, lanes(n), x); }
static inline vi vset_u(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline vi vor(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vshl16(vi a) { return _mm512_slli_epi32(a, 16); }
static inline vi vhigh16(vi a) { return _mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000u)); }
static inline vf as_f(vi a) { return _mm512_castsi512_ps(a); }
static inline vi as_u(vf a) { return _mm512_castps_si512(a); }
static inline vi vload_u16_n(const uint16_t* p, int n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p));
}
// Rows a and b of 2W bfloat16 (n valid, the rest zero) as pairs (a[d], b[d]), in an order of columns that costs one
// instruction; vunpair restores the columns' order in sums over such pairs.
static inline void vpair(const uint16_t* a, const uint16_t* b, int n, vi* lo, vi* hi) {
  const __mmask32 m = n >= 32 ? ~0u : (1u << (n < 0 ? 0 : n)) - 1;
  const vi x = _mm512_maskz_loadu_epi16(m, a), y = _mm512_maskz_loadu_epi16(m, b);
  *lo = _mm512_unpacklo_epi16(x, y);
  *hi = _mm512_unpackhi_epi16(x, y);
}
static inline void vunpair(vf lo, vf hi, vf* x, vf* y) {
  *x = _mm512_permutex2var_ps(lo, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), hi);
  *y = _mm512_permutex2var_ps(lo, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), hi);
}
static inline __m256i to_bf16(vf x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  vi u = as_u(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16));
#endif
}
static inline void vstore_bf16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
static inline void vstore_bf16_n(uint16_t* p, vf x, int n) { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16(x)); }

// Transposes the W x W matrix of units r, in place.
static inline void transpose(vi r[W]) {
  vi t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
static inline __m256i lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf vzero() { return _mm256_setzero_ps(); }
static inline vf vset(float x) { return _mm256_set1_ps(x); }
static inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
static inline vf vload_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes(n)); }
static inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
static inline void vstore_n(float* p, vf x, int n) { _mm256_maskstore_ps(p, lanes(n), x); }
static inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vnfma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
static inline float vsum(vf x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vfirst(vf x) { return _mm256_cvtss_f32(x); }
static inline float vhmax(vf x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline vf vkeep(vf x, int n, vf other) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(lanes(n))); }
static inline vf vfraction(vf x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
static inline vf vldexp_floor(vf p, vf x) {  // p * 2^floor(x), the exponent held within [-126, 127]
  x = _mm256_floor_ps(_mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-126.0f)), _mm256_set1_ps(127.0f)));
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
}
static inline vi vload_u(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline vi vload_u_n(const uint32_t* p, int n) { return _mm256_maskload_epi32((const int*)p, lanes(n)); }
static inline void vstore_u(uint32_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
static inline void vstore_u_n(uint32_t* p, vi x, int n) { _mm256_maskstore_epi32((int*)p, lanes(n), x); }
static inline vi vset_u(uint32_t x) { return _mm256_set1_epi32((int)x); }
static inline vi vor(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vshl16(vi a) { return _mm256_slli_epi32(a, 16); }
static inline vi vhigh16(vi a) { return _mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000u)); }
static inline vf as_f(vi a) { return _mm256_castsi256_ps(a); }
static inline vi as_u(vf a) { return _mm256_castps_si256(a); }
static inline vi vload_u16_n(const uint16_t* p, int n) {
  if (n >= 8) return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  uint16_t t[8] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)t));
}
static inline void vpair(const uint16_t* a, const uint16_t* b, int n, vi* lo, vi* hi) {
  uint16_t t[2][16] = {};
  if (n < 16) {
    memcpy(t[0], a, 2 * (size_t)(n < 0 ? 0 : n));
    memcpy(t[1], b, 2 * (size_t)(n < 0 ? 0 : n));
    a = t[0], b = t[1];
  }
  const vi x = _mm256_loadu_si256((const __m256i*)a), y = _mm256_loadu_si256((const __m256i*)b);
  *lo = _mm256_unpacklo_epi16(x, y);
  *hi = _mm256_unpackhi_epi16(x, y);
}
static inline void vunpair(vf lo, vf hi, vf* x, vf* y) {
  *x = _mm256_permute2f128_ps(lo, hi, 0x20);
  *y = _mm256_permute2f128_ps(lo, hi, 0x31);
}
static inline __m128i to_bf16(vf x) {
  vi u = as_u(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  u = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
static inline void vstore_bf16(uint16_t* p, vf x) { _mm_storeu_si128((__m128i*)p, to_bf16(x)); }
static inline void vstore_bf16_n(uint16_t* p, vf x, int n) {
  uint16_t t[8];
  vstore_bf16(t, x);
  memcpy(p, t, 2 * (size_t)(n < 0 ? 0 : n < 8 ? n : 8));
}
static inline void transpose(vi r[W]) {
  vi t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#else
#error "the CPU executor needs AVX2 and FMA"
#endif

// float32: a unit is one element.
struct F32 {
  using elem = float;
  static constexpr int PER_UNIT = 1;
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

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

}  // namespace baton
