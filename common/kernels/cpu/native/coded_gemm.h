// Products with quantised weights (coded.h).
//
//   coded rows x coded panels   a group's dot products are integers, exact in any order; groups are added in ascending k
//   float rows x coded panels   panels are decoded once a chunk, then multiplied as float32 (gemm.h)
//
// Either way an element is one chain over k, whatever the tile or thread: a row's bits depend on that row alone.
#pragma once
#include "coded.h"

namespace baton {

// Most rows of a tile. Sums of integers fill the registers; those in float32, touched once a group, may spill.
#if defined(__AVX512F__)
constexpr int CODED_MR = 8;
#else
constexpr int CODED_MR = 5;
#endif

// C tile [M][NR] at c from M coded rows and one panel, over all groups.
template <class F, int M>
void coded_micro(int groups, const uint32_t* a, size_t lda, const char* panel, float* c, Ahead ahead) {
  constexpr bool FOUR = F::FORMAT == Format::INT4;
  const uint32_t* scales = a + (size_t)groups * GROUP_UNITS;
  const uint32_t* corrections = scales + groups;
  vf sum[M][2];
  for (int r = 0; r < M; ++r) sum[r][0] = sum[r][1] = vzero();
  for (int g = 0; g < groups; ++g, panel += F::GROUP_BYTES) {
    vi acc[M][2];
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) acc[r][0] = acc[r][1] = FOUR ? vzero_u() : vset_u(corrections[r * lda + g]);
    const uint32_t* codes = (const uint32_t*)panel;
    const uint32_t* units = a + (size_t)g * GROUP_UNITS;
    for (int i = 0; i < ahead.lines; ++i) _mm_prefetch(ahead.from + ((size_t)g * ahead.lines + i) * 64, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int u = 0; u < (FOUR ? GROUP_UNITS / 2 : GROUP_UNITS); ++u) {
      const vi x = vload_u(codes + u * NR), y = vload_u(codes + u * NR + W);
      if constexpr (FOUR) {
        const vi nibble = vset_u(0x0f0f0f0fu);
        const Bytes lo[2] = {unsigned_bytes(vand(x, nibble)), unsigned_bytes(vand(y, nibble))};
        const Bytes hi[2] = {unsigned_bytes(vand(vshr4(x), nibble)), unsigned_bytes(vand(vshr4(y), nibble))};
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const Bytes p = signed_bytes(units[r * lda + u]), q = signed_bytes(units[r * lda + u + GROUP_UNITS / 2]);
          for (int j = 0; j < 2; ++j) acc[r][j] = dot8(dot8(acc[r][j], p, lo[j]), q, hi[j]);
        }
      } else {
        const Bytes b[2] = {unsigned_bytes(x), unsigned_bytes(y)};
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const Bytes p = signed_bytes(units[r * lda + u]);
          for (int j = 0; j < 2; ++j) acc[r][j] = dot8(acc[r][j], p, b[j]);
        }
      }
    }
    const uint16_t* of_group = (const uint16_t*)(panel + F::CODE_BYTES);
    const vf scale[2] = {vload_bf16(of_group), vload_bf16(of_group + W)};
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      const vf row_scale = as_f(vset_u(scales[r * lda + g]));
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        sum[r][j] = vfma(vmul(vfloat(acc[r][j]), row_scale), scale[j], sum[r][j]);
        if constexpr (FOUR)
          sum[r][j] = vfma(vload_bf16(of_group + NR + j * W), as_f(vset_u(corrections[r * lda + g])), sum[r][j]);
      }
    }
  }
  for (int r = 0; r < M; ++r)
    for (int j = 0; j < 2; ++j) vstore(c + r * NR + j * W, sum[r][j]);
}

using CodedMicro = void (*)(int groups, const uint32_t* a, size_t lda, const char* panel, float* c, Ahead ahead);

template <class F>
CodedMicro coded_micro_for(int m) {
  switch (m) {
#define BATON_ROWS(M) \
  case M:             \
    return &coded_micro<F, M>;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5)
#if defined(__AVX512F__)
    BATON_ROWS(6) BATON_ROWS(7) BATON_ROWS(8)
#endif
#undef BATON_ROWS
  }
  return nullptr;
}

// As ahead_of in gemm.h, by the group: one tile fetches ahead in its own stream, of several the first two the next panel.
template <class F>
Ahead coded_ahead(const char* panel, int groups, int tiles, int i) {
  constexpr size_t DISTANCE = 4096;
  constexpr int LINES = (F::GROUP_BYTES + 63) / 64;
  if (tiles == 1) return {panel + DISTANCE, LINES};
  constexpr int HALF = (LINES + 1) / 2;
  return {panel + (size_t)groups * F::GROUP_BYTES + (size_t)i * groups * HALF * 64, i < 2 ? HALF : 0};
}

// Columns [p0*NR, p1*NR) of C for `rows` (<= MAX_ROWS) coded rows; see gemm.
template <class F, class Epilogue>
void coded_gemm(int rows, const uint32_t* a, size_t lda, const char* panels, int groups, int p0, int p1,
                float* scratch, const Epilogue& epilogue) {
  const int tiles = ceil_div(rows, CODED_MR);
  for (int p = p0; p < p1; ++p) {
    const char* panel = panels + (size_t)p * groups * F::GROUP_BYTES;
    for (int i = 0; i < tiles; ++i) {
      const int r0 = tile_begin(rows, tiles, i), m = tile_begin(rows, tiles, i + 1) - r0;
      coded_micro_for<F>(m)(groups, a + r0 * lda, lda, panel, scratch + r0 * NR, coded_ahead<F>(panel, groups, tiles, i));
    }
    epilogue(p, scratch);
  }
}

// The same for float rows: `decoded`, [k][NR] floats, holds a panel at a time.
template <class Epilogue>
void decoded_gemm(Format f, int rows, const uint32_t* a, size_t lda, const char* panels, int k, int p0, int p1,
                  float* decoded, float* scratch, const Epilogue& epilogue) {
  for (int p = p0; p < p1; ++p) {
    decode_panel(f, panels + (size_t)p * groups_of(k) * group_bytes(f), k, decoded);
    gemm<F32>(rows, a, lda, (const uint32_t*)decoded, k, 0, 1, scratch,
              [&](int, const float* c) { epilogue(p, c); });
  }
}

}  // namespace baton
