// Matrix kernels: C[m, n] = sum over k of A[m, k] * B[n, k], B packed, sums in float32.
//
//   B  panel p holds columns [p*NR, (p+1)*NR):   [k_units][NR] units, so one pass over k reads it front to back
//   A  rows of units, `lda` apart
//
// Every element is one chain of dot() steps in ascending k, whatever the tile shape, batch size or thread: results are
// bitwise independent of what else is in the batch.
#pragma once
#include "simd.h"

namespace baton {

constexpr int NR = 2 * W;  // columns of a panel
#if defined(__AVX512F__)
constexpr int MR = 12;  // most rows of a tile: 12 x 2 accumulators of 32 registers
#else
constexpr int MR = 5;  // 5 x 2 of 16
#endif

// What a tile fetches into the cache while it computes: `lines` (0, 1, 2) cache lines a step of k, front to back.
struct Ahead {
  const char* from = nullptr;
  int lines = 0;
};

using Micro = void (*)(int k, const uint32_t* a, size_t lda, const uint32_t* b, size_t panel, float* c, size_t ldc,
                       bool accumulate, Ahead ahead);

// C tile [M][NP * NR] at c, rows ldc floats apart; `accumulate` continues the chains already in c.
template <class T, int M, int NP>
void micro(int k, const uint32_t* a, size_t lda, const uint32_t* b, size_t panel, float* c, size_t ldc,
           bool accumulate, Ahead ahead) {
  constexpr int N = 2 * NP;
  vf acc[M][N];
#pragma GCC unroll 12
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[r][j] = accumulate ? vload(c + r * ldc + j * W) : vzero();
  const uint32_t* rows[4] = {a, a + 3 * lda, a + 6 * lda, a + 9 * lda};
  for (int u = 0; u < k; ++u) {
    typename T::B bv[N];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      const uint32_t* q = b + p * panel + (size_t)u * NR;
      bv[2 * p] = T::b_load(q);
      bv[2 * p + 1] = T::b_load(q + W);
    }
    if (ahead.lines > 0) _mm_prefetch(ahead.from + (size_t)u * ahead.lines * 64, _MM_HINT_T0);
    if (ahead.lines > 1) _mm_prefetch(ahead.from + (size_t)u * ahead.lines * 64 + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < M; ++r) {
      const typename T::B av = T::a_load(rows[r / 3] + (r % 3) * lda + u);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) acc[r][j] = T::dot(acc[r][j], av, bv[j]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) vstore(c + r * ldc + j * W, acc[r][j]);
}

// The most panels a tile of m rows may span: attention's short products need several chains to hide their latency.
static inline int max_panels(int m) { return m <= MR / 2 ? 2 : 1; }

template <class T>
Micro micro_for(int m, int np) {
  switch (np * 16 + m) {
#define BATON_ROW(M, NP) \
  case NP * 16 + M:      \
    return &micro<T, M, NP>;
    BATON_ROW(1, 1) BATON_ROW(2, 1) BATON_ROW(3, 1) BATON_ROW(4, 1) BATON_ROW(5, 1)
    BATON_ROW(1, 2) BATON_ROW(2, 2)
#if defined(__AVX512F__)
    BATON_ROW(6, 1) BATON_ROW(7, 1) BATON_ROW(8, 1) BATON_ROW(9, 1)
    BATON_ROW(10, 1) BATON_ROW(11, 1) BATON_ROW(12, 1)
    BATON_ROW(3, 2) BATON_ROW(4, 2) BATON_ROW(5, 2) BATON_ROW(6, 2)
#endif
#undef BATON_ROW
  }
  return nullptr;
}

// Rows of the i-th of `tiles` even tiles over `rows`.
static inline int tile_begin(int rows, int tiles, int i) { return (int)((int64_t)rows * i / tiles); }

constexpr int KC = 2048;              // units of k that a pass covers: its slices of A and B stay in the L2 cache
constexpr int A_BLOCK_UNITS = 65536;  // an A block of 256 KiB
constexpr int MAX_ROWS = 240;        // rows of an A block at most

static inline int block_rows(int k_units) {
  int k = k_units < KC ? k_units : KC, rows = A_BLOCK_UNITS / k / MR * MR;
  return rows < MR ? MR : rows > MAX_ROWS ? MAX_ROWS : rows;
}

// What tile i of `tiles` over panel b should fetch. One tile alone waits for memory: it fetches a little ahead in its
// own stream. With several, the first two share out the next panel, which so arrives while all of them compute.
static inline Ahead ahead_of(const uint32_t* b, size_t panel, int k, int tiles, int i) {
  constexpr size_t DISTANCE = 4096;
  if (tiles == 1) return {(const char*)b + DISTANCE, NR * 4 / 64};
  constexpr int SHARES = NR * 4 / 64;
  return {(const char*)(b + panel) + (size_t)i * k * 64, i < SHARES ? 1 : 0};
}

// Columns [p0*NR, p1*NR) of C for `rows` (<= MAX_ROWS) rows. `scratch`: [rows][NR] floats. Each panel, once summed,
// goes to epilogue(panel, const float* sums[rows][NR]).
template <class T, class Epilogue>
void gemm(int rows, const uint32_t* a, size_t lda, const uint32_t* b, int k_units, int p0, int p1, float* scratch,
          const Epilogue& epilogue) {
  const int tiles = ceil_div(rows, MR);
  const size_t panel = (size_t)k_units * NR;
  for (int p = p0; p < p1; ++p) {
    for (int k0 = 0; k0 < k_units; k0 += KC) {
      const int k = k_units - k0 < KC ? k_units - k0 : KC;
      const uint32_t* slice = b + p * panel + (size_t)k0 * NR;
      for (int i = 0; i < tiles; ++i) {
        const int r0 = tile_begin(rows, tiles, i), m = tile_begin(rows, tiles, i + 1) - r0;
        micro_for<T>(m, 1)(k, a + r0 * lda + k0, lda, slice, panel, scratch + r0 * NR, NR, k0 > 0,
                           ahead_of(slice, panel, k, tiles, i));
      }
    }
    epilogue(p, scratch);
  }
}

}  // namespace baton
