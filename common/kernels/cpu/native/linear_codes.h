// One product with coded weights, outside any model: packs, codes the rows, multiplies.
#pragma once
#include <vector>

#include "coded_gemm.h"
#include "packing.h"

namespace baton {

struct CodedLinear {
  Format format;
  int rows, k, features;
  const uint8_t* codes;
  const uint16_t *scales, *minima;

  template <class T>
  int run(const typename T::elem* x, float* out) const {
    Linear m;
    m.panels = ceil_div(features, NR);
    m.k = k;
    m.format = format;
    const size_t ld = T::CODES_ROWS ? coded_row_units(k) : (size_t)k;
    Arena arena;
    if (!arena.reserve(Arena::need<uint32_t>(m.units()) + Arena::need<uint32_t>(ld * rows) +
                       Arena::need<float>((size_t)MAX_ROWS * NR) + Arena::need<float>((size_t)k * NR)))
      return BATON_NO_MEMORY;
    m.w = arena.take<uint32_t>(m.units());
    uint32_t* operand = arena.take<uint32_t>(ld * rows);
    float *sums = arena.take<float>((size_t)MAX_ROWS * NR), *decoded = arena.take<float>((size_t)k * NR);
    pack_codes(m, ColumnMap{ColumnMap::PLAIN, 0, 0}, codes, scales, minima, features);
    for (int r = 0; r < rows; ++r) {
      if constexpr (T::CODES_ROWS)
        code_row<T>(format, x + (size_t)r * k, k, operand + r * ld);
      else
        memcpy(operand + r * ld, x + (size_t)r * k, 4 * (size_t)k);
    }
    for (int r0 = 0; r0 < rows; r0 += MAX_ROWS) {
      const int n = at_most(MAX_ROWS, rows - r0);
      const uint32_t* a = operand + r0 * ld;
      const auto keep = [&](int panel, const float* c) {
        for (int r = 0; r < n; ++r)
          memcpy(out + (size_t)(r0 + r) * features + panel * NR, c + r * NR, 4 * at_most(NR, features - panel * NR));
      };
      if constexpr (!T::CODES_ROWS)
        decoded_gemm(format, n, a, ld, m.panel(0), k, 0, m.panels, decoded, sums, keep);
      else if (format == Format::INT8)
        coded_gemm<Int8>(n, a, ld, m.panel(0), groups_of(k), 0, m.panels, sums, keep);
      else
        coded_gemm<Int4>(n, a, ld, m.panel(0), groups_of(k), 0, m.panels, sums, keep);
    }
    return BATON_OK;
  }
};

}  // namespace baton
