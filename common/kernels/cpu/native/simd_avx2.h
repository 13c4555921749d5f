// Vectors of 8 floats (AVX2, FMA). What each does: simd.h.
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace baton {

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
static inline vf vldexp_floor(vf p, vf x) {  // the exponent is held within [-126, 127]
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

}  // namespace baton
