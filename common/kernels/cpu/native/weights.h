// The model's packed weights: one arena, loaded tensor by tensor by role.
#pragma once
#include <string.h>

#include <type_traits>
#include <vector>

#include "abi.h"
#include "packing.h"

namespace baton {

// Allocation of all weights in one arena, and their loading by role.
template <class T>
class Weights {
 public:
  using elem = typename T::elem;
  Dims d;
  float eps;
  bool tied;
  std::vector<Layer> layers;
  Linear lm_head;          // tied: also the embedding
  elem* embed = nullptr;   // [vocab, hidden], where not tied
  float* final_norm = nullptr;
  float* inv_freq = nullptr;

  int init(const baton_config& c) {
    d = dims_of(c);
    eps = c.rms_norm_eps;
    tied = c.tied_embeddings != 0;
    quantization_ = c.quantization;
    layers.assign(d.layers, Layer{});
    size_t bytes = 0;
    plan(nullptr, &bytes);
    if (!arena_.reserve(bytes)) return BATON_NO_MEMORY;
    plan(&arena_, &bytes);
    memcpy(inv_freq, c.inv_freq, sizeof(float) * d.half());
    missing_ = 9 * d.layers + (tied ? 2 : 3);
    seen_.assign((size_t)(d.layers + 1) * 32, false);
    return BATON_OK;
  }

  bool complete() const { return missing_ == 0; }
  int64_t bytes() const { return (int64_t)arena_.size(); }

  int load(int role, int layer, const void* data, int64_t rows, int64_t cols) {
    if (layer < 0 || layer >= d.layers) return BATON_BAD_SHAPE;
    const elem* src = (const elem*)data;
    Matrix m;
    if (find(role, layer, &m)) {
      if (rows != m.rows || cols != m.cols) return BATON_BAD_SHAPE;
      if (role >= BATON_Q_BIAS) {
        pack_bias<T>(*m.out, m.map, src, m.rows);
        return BATON_OK;
      }
      if (m.out->format != Format::PLAIN) return BATON_BAD_SHAPE;
      pack_matrix<T>(*m.out, m.map, src, m.rows, m.cols);
    } else if (role == BATON_EMBED) {
      if (rows != d.vocab || cols != d.hidden) return BATON_BAD_SHAPE;
      memcpy(embed, src, sizeof(elem) * (size_t)rows * d.hidden);
    } else {
      float* norm = role == BATON_FINAL_NORM   ? final_norm
                    : role == BATON_INPUT_NORM ? layers[layer].input_norm
                    : role == BATON_POST_NORM  ? layers[layer].post_norm
                                               : nullptr;
      if (!norm || rows != d.hidden || cols != 1) return BATON_BAD_SHAPE;
      for (int i = 0; i < d.hidden; i += W) vstore_n(norm + i, T::load_n(src + i, d.hidden - i), d.hidden - i);
    }
    mark(role, layer);
    return BATON_OK;
  }

  int load_codes(int role, int layer, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                 int64_t rows, int64_t cols) {
    Matrix m;
    if (layer < 0 || layer >= d.layers || role >= BATON_Q_BIAS || !find(role, layer, &m)) return BATON_BAD_SHAPE;
    if (rows != m.rows || cols != m.cols || m.out->format == Format::PLAIN) return BATON_BAD_SHAPE;
    pack_codes(*m.out, m.map, codes, scales, minima, m.rows);
    mark(role, layer);
    return BATON_OK;
  }

 private:
  struct Matrix {
    int role, rows, cols;
    Linear* out;
    ColumnMap map;
  };

  // The matrix, or bias, that a role means. False: none.
  bool find(int role, int layer, Matrix* found) {
    const int q = d.heads * d.head_dim, kv = d.kv_heads * d.head_dim, h = d.hidden, m = d.inter;
    Layer& l = layers[layer];
    const int k0 = d.q_panels(), v0 = k0 + d.k_panels();
    const ColumnMap plain{ColumnMap::PLAIN, 0, 0}, qm{ColumnMap::ROTARY, 0, d.head_dim},
        km{ColumnMap::ROTARY, k0, d.head_dim}, vm{ColumnMap::VALUE, v0, d.head_dim}, gm{ColumnMap::GATE, 0, 0},
        um{ColumnMap::UP, 0, 0};
    const Matrix matrices[] = {
        {BATON_Q, q, h, &l.qkv, qm},       {BATON_K, kv, h, &l.qkv, km},   {BATON_V, kv, h, &l.qkv, vm},
        {BATON_O, h, q, &l.o, plain},      {BATON_GATE, m, h, &l.gate_up, gm},
        {BATON_UP, m, h, &l.gate_up, um},  {BATON_DOWN, h, m, &l.down, plain},
        {BATON_LM_HEAD, d.vocab, h, &lm_head, plain},
        {BATON_Q_BIAS, q, 1, &l.qkv, qm},  {BATON_K_BIAS, kv, 1, &l.qkv, km},
        {BATON_V_BIAS, kv, 1, &l.qkv, vm}, {BATON_O_BIAS, h, 1, &l.o, plain},
        {BATON_GATE_BIAS, m, 1, &l.gate_up, gm}, {BATON_UP_BIAS, m, 1, &l.gate_up, um},
        {BATON_DOWN_BIAS, h, 1, &l.down, plain}};
    if (role == BATON_EMBED && tied) role = BATON_LM_HEAD;
    for (const Matrix& x : matrices)
      if (x.role == role) {
        *found = x;
        return true;
      }
    return false;
  }

  void mark(int role, int layer) {
    const size_t at = (size_t)layer * 32 + role;
    if (!seen_[at]) --missing_;
    seen_[at] = true;
  }

  // Sizes (arena null) or places every buffer; the order is that of use, so that a step reads memory front to back.
  void plan(Arena* arena, size_t* bytes) {
    const auto place = [&](auto*& p, size_t n) {
      using E = typename std::remove_reference<decltype(*p)>::type;
      *bytes += Arena::need<E>(n);
      if (arena) p = arena->take<E>(n);
    };
    const Format head = quantization_ == BATON_PLAIN ? Format::PLAIN : Format::INT8;
    const Format matrix = quantization_ == BATON_INT4 ? Format::INT4 : head;
    const auto linear = [&](Linear& m, int panels, int k, Format format) {
      m.panels = panels;
      m.k = k;
      m.format = format;
      m.k_units = format != Format::PLAIN && T::CODES_ROWS ? groups_of(k) * GROUP_UNITS : ceil_div(k, T::PER_UNIT);
      place(m.w, m.units());
      place(m.bias, (size_t)panels * NR);
    };
    *bytes = 0;
    place(inv_freq, d.half());
    if (!tied) place(embed, (size_t)d.vocab * d.hidden);
    for (Layer& l : layers) {
      place(l.input_norm, d.hidden);
      linear(l.qkv, d.q_panels() + 2 * d.k_panels(), d.hidden, matrix);
      linear(l.o, ceil_div(d.hidden, NR), d.heads * d.head_dim, matrix);
      place(l.post_norm, d.hidden);
      linear(l.gate_up, ceil_div(d.inter, W), d.hidden, matrix);
      linear(l.down, ceil_div(d.hidden, NR), d.inter, matrix);
    }
    place(final_norm, d.hidden);
    linear(lm_head, ceil_div(d.vocab, NR), d.hidden, head);
  }

  Arena arena_;
  int missing_ = 0, quantization_ = BATON_PLAIN;
  std::vector<bool> seen_;
};

}  // namespace baton
