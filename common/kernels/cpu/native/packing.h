// Packed weights: which output column lies where, and the packing itself.
//
// A panel (gemm.h) holds 2W columns, two vectors of W. What shares a panel is chosen so that the epilogue finds all it
// needs in registers' reach:
//
//   plain     [c .. c+2W)                                                  o, down, lm_head, v
//   gate/up   [gate c .. c+W) [up c .. c+W)                                silu(gate) * up
//   q, k      [head's first half i .. i+W) [second half i .. i+W)          rotation pairs (x[i], x[i + head_dim/2])
//
// Heads are padded to whole panels. Padding columns are zero. Quantised weights (coded.h) lie in the same columns.
#pragma once
#include "abi.h"
#include "coded.h"
#include "memory.h"

namespace baton {

struct Linear {
  uint32_t* w = nullptr;    // [panels][k_units][NR], or coded panels
  float* bias = nullptr;    // [panels][NR]
  int panels = 0, k = 0;
  int k_units = 0;          // of a row that it multiplies
  Format format = Format::PLAIN;

  size_t units() const { return panels * panel_units(); }
  size_t panel_units() const {
    return format == Format::PLAIN ? (size_t)k_units * NR : groups_of(k) * group_bytes(format) / 4;
  }
  char* panel(int p) const { return (char*)(w + p * panel_units()); }
};

struct Layer {
  Linear qkv, o, gate_up, down;
  float *input_norm = nullptr, *post_norm = nullptr;
};

struct Dims {
  int layers, hidden, inter, heads, kv_heads, head_dim, vocab;
  int half() const { return head_dim / 2; }
  int group() const { return heads / kv_heads; }
  int head_panels() const { return ceil_div(head_dim, NR); }
  int q_panels() const { return heads * head_panels(); }
  int k_panels() const { return kv_heads * head_panels(); }
};

static inline Dims dims_of(const baton_config& c) {
  return {c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size};
}

// Where column c of a matrix goes: panel * NR + lane.
struct ColumnMap {
  enum Kind { PLAIN, GATE, UP, ROTARY, VALUE } kind;
  int first_panel;
  int head_dim;  // ROTARY, VALUE

  size_t operator()(int c) const {
    switch (kind) {
      case GATE:
        return (size_t)(c / W) * NR + c % W;
      case UP:
        return (size_t)(c / W) * NR + W + c % W;
      case ROTARY: {
        const int head = c / head_dim, d = c % head_dim, half = head_dim / 2, i = d % half;
        return (size_t)(first_panel + head * ceil_div(head_dim, NR) + i / W) * NR + (d >= half ? W : 0) + i % W;
      }
      case VALUE: {
        const int head = c / head_dim, d = c % head_dim;
        return (size_t)(first_panel + head * ceil_div(head_dim, NR) + d / NR) * NR + d % NR;
      }
      default:
        return (size_t)first_panel * NR + c;
    }
  }
};

// Packs `rows` output columns of a row-major [rows, k] matrix: up to W neighbours at a time, transposed in registers.
template <class T>
void pack_matrix(const Linear& out, const ColumnMap& map, const typename T::elem* src, int rows, int k) {
  const int whole = k / T::PER_UNIT;
  for (int c = 0, n; c < rows; c += n) {
    const size_t at = map(c);
    for (n = 1; n < W && c + n < rows && map(c + n) == at + n && (at + n) % W != 0;) ++n;
    uint32_t* dst = out.w + at / NR * out.k_units * NR + at % NR;
    const auto row = [&](int i) { return (const char*)(src + (size_t)(c + i) * k); };
    for (int u = 0; u < whole; u += W) {
      const int left = whole - u < W ? whole - u : W;
      vi r[W];
      for (int i = 0; i < W; ++i) r[i] = i < n ? vload_u_n((const uint32_t*)(row(i) + 4 * (size_t)u), left) : vset_u(0);
      transpose(r);
      for (int i = 0; i < left; ++i) vstore_u_n(dst + (size_t)(u + i) * NR, r[i], n);
    }
    for (int i = 0; i < n && whole < out.k_units; ++i) {  // an odd k in bfloat16: the last unit's high half is zero
      uint16_t last;
      memcpy(&last, row(i) + 4 * (size_t)whole, 2);
      dst[(size_t)whole * NR + i] = last;
    }
  }
}

static inline void pack_codes(const Linear& out, const ColumnMap& map, const uint8_t* codes, const uint16_t* scales,
                              const uint16_t* minima, int rows) {
  const int groups = groups_of(out.k);
  for (int c = 0; c < rows; ++c, codes += (size_t)groups * GROUP, scales += groups, minima += groups) {
    const size_t at = map(c);
    pack_coded_column(out.format, groups, codes, scales, minima, out.panel((int)(at / NR)), (int)(at % NR));
  }
}

template <class T>
void pack_bias(const Linear& out, const ColumnMap& map, const typename T::elem* src, int rows) {
  for (int c = 0; c < rows; ++c) {
    float lane[W];
    vstore(lane, T::load_n(src + c, 1));
    out.bias[map(c)] = lane[0];
  }
}

// Row `id` of a PLAIN-packed matrix as floats: the embedding look-up of tied weights. out: [k_units * PER_UNIT].
template <class T>
void unpack_row(const Linear& m, int id, float* out) {
  if (m.format != Format::PLAIN) return decode_column(m.format, m.panel(id / NR), id % NR, m.k, out, 1);
  const uint32_t* src = m.w + (size_t)(id / NR) * m.k_units * NR + id % NR;
  for (int u = 0; u < m.k_units; ++u) {
    const uint32_t x = src[(size_t)u * NR];
    if (T::PER_UNIT == 2) {
      const uint32_t even = x << 16, odd = x & 0xffff0000u;
      memcpy(out + 2 * u, &even, 4);
      memcpy(out + 2 * u + 1, &odd, 4);
    } else {
      memcpy(out + u, &x, 4);
    }
  }
}

}  // namespace baton
