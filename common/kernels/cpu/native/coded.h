// Quantised operands: weights as 8- or 4-bit codes with a scale a group, and rows of activations as int8.
// What codes mean, and how they are chosen: common/kernels/quantization.py.
//
// A panel of weights (NR columns) is a run of groups of 32 k, read front to back:
//
//   int8   [8 units][NR] of 4 codes along k                                          | NR scales, bfloat16
//   int4   [4 units][NR] of 4 bytes: low nibbles are unit u, high nibbles unit u + 4 | NR scales | NR minima
//
// A row of activations:   [groups][8 units] int8 | [groups] scales, float | [groups] corrections
// where a correction is what a column adds beside scale * dot(codes): in int8 an integer, -128 * sum of the row's
// codes, for weights' codes are signed codes + 128; in int4 a float, the row's scaled sum, which the minimum multiplies.
#pragma once
#include <math.h>

#include "gemm.h"
#include "simd_int8.h"

namespace baton {

constexpr int GROUP = 32;          // k of a group
constexpr int GROUP_UNITS = 8;     // 4-byte units of a group's codes

enum class Format : uint8_t { PLAIN, INT8, INT4 };  // PLAIN: the model's dtype

struct Int8 {
  static constexpr Format FORMAT = Format::INT8;
  static constexpr int CODE_BYTES = GROUP * NR, GROUP_BYTES = CODE_BYTES + 2 * NR;
};
struct Int4 {
  static constexpr Format FORMAT = Format::INT4;
  static constexpr int CODE_BYTES = GROUP * NR / 2, GROUP_BYTES = CODE_BYTES + 4 * NR;
};

static inline int groups_of(int k) { return ceil_div(k, GROUP); }
static inline size_t group_bytes(Format f) { return f == Format::INT8 ? Int8::GROUP_BYTES : Int4::GROUP_BYTES; }

// Distance of coded rows in units: cache lines, an odd number of them.
static inline size_t coded_row_units(int k) {
  return (round_up((size_t)groups_of(k) * (GROUP_UNITS + 2), 16) / 16 | 1) * 16;
}

// One column's codes [groups * 32] (a byte each), scales and minima, into lane `lane` of the panel at `panel`.
static inline void pack_coded_column(Format f, int groups, const uint8_t* codes, const uint16_t* scales,
                                     const uint16_t* minima, char* panel, int lane) {
  for (int g = 0; g < groups; ++g, codes += GROUP, panel += group_bytes(f)) {
    if (f == Format::INT8) {
      for (int u = 0; u < GROUP_UNITS; ++u) memcpy(panel + 4 * (u * NR + lane), codes + 4 * u, 4);
      memcpy(panel + Int8::CODE_BYTES + 2 * lane, scales + g, 2);
    } else {
      for (int u = 0; u < GROUP_UNITS / 2; ++u)
        for (int i = 0; i < 4; ++i)
          panel[4 * (u * NR + lane) + i] = (char)(codes[4 * u + i] | codes[4 * (u + GROUP_UNITS / 2) + i] << 4);
      memcpy(panel + Int4::CODE_BYTES + 2 * lane, scales + g, 2);
      memcpy(panel + Int4::CODE_BYTES + 2 * NR + 2 * lane, minima + g, 2);
    }
  }
}

static inline float from_bf16(const char* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  const uint32_t word = (uint32_t)half << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}

// Weights k < n of lane `lane`, as floats `stride` apart: scale * code + minimum, rounded once.
static inline void decode_column(Format f, const char* panel, int lane, int n, float* out, size_t stride) {
  for (int k = 0; k < n; ++k) {
    const char* group = panel + k / GROUP * group_bytes(f);
    const int u = k % GROUP / 4, half = GROUP_UNITS / 2;
    if (f == Format::INT8) {
      const uint8_t code = (uint8_t)group[4 * (u * NR + lane) + k % 4];
      out[k * stride] = from_bf16(group + Int8::CODE_BYTES + 2 * lane) * (float)(code - 128);
    } else {
      const uint8_t byte = (uint8_t)group[4 * (u % half * NR + lane) + k % 4], code = u < half ? byte & 15 : byte >> 4;
      const char* scales = group + Int4::CODE_BYTES + 2 * lane;
      out[k * stride] = fmaf(from_bf16(scales), (float)code, from_bf16(scales + 2 * NR));
    }
  }
}

// A panel as floats, out[k][NR]: group by group, vectors of columns.
static inline void decode_panel(Format f, const char* panel, int n, float* out) {
  const vi byte = vset_u(0xff), nibble = vset_u(0x0f);
  for (int k0 = 0; k0 < n; k0 += GROUP, panel += group_bytes(f)) {
    const uint16_t* scales = (const uint16_t*)(panel + (f == Format::INT8 ? Int8::CODE_BYTES : Int4::CODE_BYTES));
    for (int j = 0; j < 2; ++j) {
      const vf scale = vload_bf16(scales + j * W);
      const vf minimum = f == Format::INT8 ? vmul(scale, vset(-128.0f)) : vload_bf16(scales + NR + j * W);
      for (int k = 0; k < GROUP && k0 + k < n; ++k) {
        const int u = k / 4, half = GROUP_UNITS / 2;
        const uint32_t* at = (const uint32_t*)panel + (f == Format::INT8 ? u : u % half) * NR + j * W;
        const int shift = 8 * (k % 4) + (f == Format::INT4 && u >= half ? 4 : 0);
        const vi code = vand(vshr(vload_u(at), shift), f == Format::INT8 ? byte : nibble);
        vstore(out + (size_t)(k0 + k) * NR + j * W, vfma(vfloat(code), scale, minimum));
      }
    }
  }
}

// x[0:k) as a coded row at `out`. NaN and infinity give codes of no meaning and a scale that is not finite.
template <class T>
void code_row(Format f, const typename T::elem* x, int k, uint32_t* out) {
  const int groups = groups_of(k);
  int8_t* codes = (int8_t*)out;
  float* scales = (float*)(out + (size_t)groups * GROUP_UNITS);
  float* corrections = scales + groups;
  for (int g = 0; g < groups; ++g, codes += GROUP) {
    constexpr int N = GROUP / W;
    vf v[N], most = vzero();
    for (int i = 0; i < N; ++i) {
      const int at = g * GROUP + i * W;
      v[i] = T::load_n(x + (at < k ? at : 0), k - at);
      most = vmax(most, vabs(v[i]));
    }
    const float largest = vhmax(most);
    const vf inverse = vset(largest > 0 ? 127.0f / largest : 0.0f);
    vi sum = vzero_u();
    for (int i = 0; i < N; ++i) {
      const vi code = vround(vmul(v[i], inverse));
      vstore_bytes(codes + i * W, code);
      sum = vadd_u(sum, code);
    }
    scales[g] = largest * (1.0f / 127.0f);
    const int total = vsum_u(sum), lifted = -128 * total;
    if (f == Format::INT8)
      memcpy(corrections + g, &lifted, 4);
    else
      corrections[g] = scales[g] * (float)total;
  }
}

}  // namespace baton
