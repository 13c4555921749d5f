// Vectors of 16 floats (AVX-512 F, BW, VL, DQ; BF16 where the compiler is told so). What each does: simd.h.
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace baton {

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
static inline vf vkeep(vf x, int n, vf other) { return _mm512_mask_blend_ps(lanes(n), other, x); }
static inline vf vfraction(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline vf vldexp_floor(vf p, vf x) { return _mm512_scalef_ps(p, x); }
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

}  // namespace baton
