// Products of 8-bit integers: VNNI where the compiler is told of it, else the same sums by 16-bit multiplication.
//
// A unit is 4 bytes along k. dot8(acc, a, b) adds to W 32-bit sums a unit's products, b's bytes unsigned, a's signed:
// exact in every instruction set, so that all give the same bits.
#pragma once
#include "simd.h"

namespace baton {

#if defined(__AVX512F__)
static inline vi vand(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vshr4(vi a) { return _mm512_srli_epi16(a, 4); }
static inline vi vshr(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline vi vzero_u() { return _mm512_setzero_si512(); }
static inline vi vadd_u(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline int vsum_u(vi a) { return _mm512_reduce_add_epi32(a); }
static inline vf vfloat(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vround(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf vabs(vf a) { return _mm512_abs_ps(a); }
static inline vf vload_bf16(const uint16_t* p) {
  return as_f(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void vstore_bytes(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
#else
static inline vi vand(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vshr4(vi a) { return _mm256_srli_epi16(a, 4); }
static inline vi vshr(vi a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline vi vzero_u() { return _mm256_setzero_si256(); }
static inline vi vadd_u(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline int vsum_u(vi a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
static inline vf vfloat(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi vround(vf a) { return _mm256_cvtps_epi32(a); }
static inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vload_bf16(const uint16_t* p) {
  return as_f(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline void vstore_bytes(int8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
#endif

#if defined(__AVX512VNNI__)
struct Bytes {
  vi v;
};
static inline Bytes unsigned_bytes(vi x) { return {x}; }
static inline Bytes signed_bytes(uint32_t x) { return {vset_u(x)}; }
static inline vi dot8(vi acc, const Bytes& a, const Bytes& b) { return _mm512_dpbusd_epi32(acc, b.v, a.v); }
#elif defined(__AVXVNNI__)
struct Bytes {
  vi v;
};
static inline Bytes unsigned_bytes(vi x) { return {x}; }
static inline Bytes signed_bytes(uint32_t x) { return {vset_u(x)}; }
static inline vi dot8(vi acc, const Bytes& a, const Bytes& b) { return _mm256_dpbusd_avx_epi32(acc, b.v, a.v); }
#elif defined(__AVX512F__)
struct Bytes {
  vi even, odd;  // 16-bit words
};
static inline Bytes unsigned_bytes(vi x) { return {vand(x, vset_u(0x00ff00ffu)), _mm512_srli_epi16(x, 8)}; }
static inline Bytes signed_bytes(uint32_t x) {
  const vi v = vset_u(x);
  return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)};
}
static inline vi dot8(vi acc, const Bytes& a, const Bytes& b) {
  return vadd_u(vadd_u(acc, _mm512_madd_epi16(a.even, b.even)), _mm512_madd_epi16(a.odd, b.odd));
}
#else
struct Bytes {
  vi even, odd;
};
static inline Bytes unsigned_bytes(vi x) { return {vand(x, vset_u(0x00ff00ffu)), _mm256_srli_epi16(x, 8)}; }
static inline Bytes signed_bytes(uint32_t x) {
  const vi v = vset_u(x);
  return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
static inline vi dot8(vi acc, const Bytes& a, const Bytes& b) {
  return vadd_u(vadd_u(acc, _mm256_madd_epi16(a.even, b.even)), _mm256_madd_epi16(a.odd, b.odd));
}
#endif

}  // namespace baton
