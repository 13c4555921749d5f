// The model's arithmetic: what a thread does for one chunk of a phase (plan.h says which phases there are).
#pragma once
#include <pthread.h>

#include "attention_phase.h"
#include "coded_gemm.h"
#include "weights.h"
#include "workspace.h"

namespace baton {

// What the C ABI sees.
class Model {
 public:
  virtual ~Model() = default;
  virtual int load(int role, int layer, const void* data, int64_t rows, int64_t cols) = 0;
  virtual int load_codes(int role, int layer, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                         int64_t rows, int64_t cols) = 0;
  virtual int forward(const baton_batch& batch) = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t workspace_bytes() const = 0;
};

template <class T>
class ModelOf final : public Model, public Job {
 public:
  using elem = typename T::elem;

  explicit ModelOf(const baton_config& c) : attention_(dims_of(c), plan_, ws_), team_(c.num_threads, c.spin_us) {}

  int init(const baton_config& c) {
    const int rc = w_.init(c);
    if (rc != BATON_OK) return rc;
    ws_.init(w_.d, c.num_threads, attention_.v_cols(), c.quantization != BATON_PLAIN);
    switch (team_.start(c.cpus)) {
      case Team::Started::NO_THREAD:
        return BATON_NO_MEMORY;
      case Team::Started::NO_CPU:
        return BATON_BAD_CPU;
      default:
        return BATON_OK;
    }
  }

  int load(int role, int layer, const void* data, int64_t rows, int64_t cols) override {
    return w_.load(role, layer, data, rows, cols);
  }
  int load_codes(int role, int layer, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                 int64_t rows, int64_t cols) override {
    return w_.load_codes(role, layer, codes, scales, minima, rows, cols);
  }
  int64_t weight_bytes() const override { return w_.bytes(); }
  int64_t workspace_bytes() const override { return (int64_t)ws_.bytes(); }

  int forward(const baton_batch& batch) override {
    pthread_mutex_lock(&mutex_);
    int rc = w_.complete() ? check_batch(w_.d, batch) : BATON_NOT_LOADED;
    if (rc == BATON_OK) {
      b_ = batch;
      pool_ = PoolShape(w_.d, b_);
      attention_.begin_step(b_);
      plan_.build(w_.d, w_.layers[0], w_.lm_head, b_, team_.size(), TILE, attention_.v_cols(),
                  coded(w_.lm_head));
      if (!ws_.reserve(b_.num_tokens, b_.num_logits, plan_)) rc = BATON_NO_MEMORY;
    }
    if (rc == BATON_OK) {
      team_.run(this, plan_.chunks);
      phases_done_ += (int64_t)plan_.phases.size();
    }
    pthread_mutex_unlock(&mutex_);
    return rc;
  }

  void run_chunk(int phase, int chunk, int thread) override {
    const Phase p = plan_.phases[phase];
    const Layer& l = w_.layers[p.layer];
    Scratch<T>& s = ws_.scratch[thread];
    const int t = b_.num_tokens, row0 = chunk * ROWS_PER_CHUNK, row1 = at_most(row0 + ROWS_PER_CHUNK, t);
    const auto hidden = [this](int r) { return r; };
    const auto wanted = [this](int r) { return (int)b_.logits_rows[r]; };
    switch (p.op) {
      case Op::EMBED:
        for (int r = row0; r < row1; ++r) embed(r);
        break;
      case Op::INPUT_NORM:
      case Op::POST_NORM:
        norm_rows(row0, row1, p.op == Op::INPUT_NORM ? l.input_norm : l.post_norm, ws_.x, hidden);
        code_rows(row0, row1, p.op == Op::INPUT_NORM ? l.qkv : l.gate_up, ws_.x, ws_.ldx, ws_.codes);
        break;
      case Op::QKV: {
        elem* pool = (elem*)b_.kv_pool + (size_t)p.layer * b_.num_blocks * pool_.block_stride;
        product(plan_.qkv, chunk, l.qkv, phase, normed(phase, t, l.input_norm, s, hidden), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_qkv(r0, r1, panel, c, l.qkv, pool); });
        break;
      }
      case Op::ATTENTION:
        for (int i = plan_.task_begin(chunk); i < plan_.task_begin(chunk + 1); ++i) attention_.attend(i, p.layer, s);
        break;
      case Op::CODE_ATTN:
        code_rows(row0, row1, l.o, ws_.attn, ws_.ld_attn, ws_.codes);
        break;
      case Op::O:
        product(plan_.o, chunk, l.o, phase, ws_.attn, ws_.ld_attn, s,
                [&](int r0, int r1, int panel, const float* c) { add_hidden(r0, r1, panel, c, l.o); });
        break;
      case Op::GATE_UP:
        product(plan_.gate_up, chunk, l.gate_up, phase, normed(phase, t, l.post_norm, s, hidden), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_act(r0, r1, panel, c, l.gate_up); });
        break;
      case Op::CODE_ACT:
        code_rows(row0, row1, l.down, ws_.act, ws_.ld_act, ws_.codes);
        break;
      case Op::DOWN:
        product(plan_.down, chunk, l.down, phase, ws_.act, ws_.ld_act, s,
                [&](int r0, int r1, int panel, const float* c) { add_hidden(r0, r1, panel, c, l.down); });
        break;
      case Op::FINAL_NORM:
        norm_rows(row0, at_most(row0 + ROWS_PER_CHUNK, b_.num_logits), w_.final_norm, ws_.x, wanted);
        code_rows(row0, at_most(row0 + ROWS_PER_CHUNK, b_.num_logits), w_.lm_head, ws_.x, ws_.ldx, ws_.codes);
        break;
      case Op::LOGITS:
        product(plan_.lm_head, chunk, w_.lm_head, phase, normed(phase, b_.num_logits, w_.final_norm, s, wanted), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_logits(r0, r1, panel, c); });
        break;
      case Op::GREEDY:
        b_.greedy[chunk] = argmax(b_.logits + (size_t)chunk * w_.d.vocab, w_.d.vocab);
        break;
    }
  }

 private:
  // a: the rows in T; where the product takes codes, they were made of `a` by the phase before, or, for few rows, are
  // made by this thread on its first chunk.
  template <class Epilogue>
  void product(const Grid& g, int chunk, const Linear& m, int phase, const elem* a, size_t lda, Scratch<T>& s,
               const Epilogue& epilogue) {
    const int r0 = g.row0(chunk), rows = g.row1(chunk) - r0, p0 = g.panel0(chunk), p1 = g.panel1(chunk);
    const auto done = [&](int panel, const float* c) { epilogue(r0, r0 + rows, panel, c); };
    const uint32_t* plain = (const uint32_t*)(a + (size_t)r0 * lda);
    if (m.format == Format::PLAIN) {
      gemm<T>(rows, plain, lda / T::PER_UNIT, m.w, m.k_units, p0, p1, s.gemm, done);
    } else if constexpr (T::CODES_ROWS) {
      const size_t ld = coded_row_units(m.k);
      const uint32_t* codes = coded_rows(phase, g.rows, m, a, lda, s) + r0 * ld;
      if (m.format == Format::INT8)
        coded_gemm<Int8>(rows, codes, ld, m.panel(0), groups_of(m.k), p0, p1, s.gemm, done);
      else
        coded_gemm<Int4>(rows, codes, ld, m.panel(0), groups_of(m.k), p0, p1, s.gemm, done);
    } else {
      decoded_gemm(m.format, rows, plain, lda, m.panel(0), m.k, p0, p1, s.decoded, s.gemm, done);
    }
  }

  static bool coded(const Linear& m) { return T::CODES_ROWS && m.format != Format::PLAIN; }

  // Rows [r0, r1) as codes, where the matrix takes them.
  void code_rows(int r0, int r1, const Linear& m, const elem* rows, size_t ld, uint32_t* out) {
    if (!coded(m)) return;
    for (int r = r0; r < r1; ++r)
      code_row<T>(m.format, rows + (size_t)r * ld, m.k, out + (size_t)r * coded_row_units(m.k));
  }

  const uint32_t* coded_rows(int phase, int count, const Linear& m, const elem* rows, size_t ld, Scratch<T>& s) {
    if (count > OWN_NORM_ROWS) return ws_.codes;
    if (s.codes_made_for != phases_done_ + phase) {
      code_rows(0, count, m, rows, ld, s.codes);
      s.codes_made_for = phases_done_ + phase;
    }
    return s.codes;
  }

  void embed(int t) {
    const int64_t slot = b_.slot_mapping[t];
    ws_.kv_offset[t] = slot / b_.block_size * (int64_t)pool_.block_stride + slot % b_.block_size * w_.d.head_dim;
    float* angles = ws_.angles + (size_t)t * 2 * ws_.ld_angle;
    rotation(b_.positions[t], w_.inv_freq, w_.d.half(), angles, angles + ws_.ld_angle);
    float* out = ws_.hidden + (size_t)t * ws_.ld_hidden;
    const int n = w_.d.hidden;
    if (w_.tied) {
      unpack_row<T>(w_.lm_head, (int)b_.token_ids[t], out);
    } else {
      const elem* row = w_.embed + (size_t)b_.token_ids[t] * n;
      for (int i = 0; i < n; i += W) vstore_n(out + i, T::load_n(row + i, n - i), n - i);
    }
  }

  // out rows [r0, r1) = RMSNorm of hidden rows source(r).
  template <class Source>
  void norm_rows(int r0, int r1, const float* weight, elem* out, const Source& source) {
    for (int r = r0; r < r1; ++r)
      rms_norm<T>(ws_.hidden + (size_t)source(r) * ws_.ld_hidden, weight, w_.d.hidden, (int)ws_.ld_hidden, w_.eps,
                  out + (size_t)r * ws_.ldx);
  }

  // The phase's normalised input: made by the phase before, or, for few rows, by this thread on its first chunk.
  template <class Source>
  const elem* normed(int phase, int rows, const float* weight, Scratch<T>& s, const Source& source) {
    if (rows > OWN_NORM_ROWS) return ws_.x;
    if (s.x_made_for != phases_done_ + phase) {
      norm_rows(0, rows, weight, s.x, source);
      s.x_made_for = phases_done_ + phase;
    }
    return s.x;
  }

  // Epilogues: one panel of a product, rows [r0, r1), sums at c[rows][NR].

  struct Bias {
    vf x, y;
    Bias(const Linear& m, int panel) {
      x = vload(m.bias + (size_t)panel * NR);
      y = vload(m.bias + (size_t)panel * NR + W);
    }
  };

  void add_hidden(int r0, int r1, int panel, const float* c, const Linear& m) {
    const Bias bias(m, panel);
    const int left = w_.d.hidden - panel * NR;
    float* out = ws_.hidden + (size_t)r0 * ws_.ld_hidden + (size_t)panel * NR;
    for (int r = r0; r < r1; ++r, c += NR, out += ws_.ld_hidden) {
      vstore_n(out, vadd(vload_n(out, left), vadd(vload(c), bias.x)), left);
      vstore_n(out + W, vadd(vload_n(out + W, left - W), vadd(vload(c + W), bias.y)), left - W);
    }
  }

  void store_act(int r0, int r1, int panel, const float* c, const Linear& m) {
    const Bias bias(m, panel);
    elem* out = ws_.act + (size_t)r0 * ws_.ld_act + (size_t)panel * W;
    for (int r = r0; r < r1; ++r, c += NR, out += ws_.ld_act)
      T::store(out, vmul(silu<T>(vadd(vload(c), bias.x)), vadd(vload(c + W), bias.y)));
  }

  void store_logits(int r0, int r1, int panel, const float* c) {
    const int left = w_.d.vocab - panel * NR;
    float* out = b_.logits + (size_t)r0 * w_.d.vocab + (size_t)panel * NR;
    for (int r = r0; r < r1; ++r, c += NR, out += w_.d.vocab) {
      vstore_n(out, vload(c), left);
      vstore_n(out + W, vload(c + W), left - W);
    }
  }

  // A panel of q or k is a head's rotation pairs (rotated here), one of v its plain columns.
  void store_qkv(int r0, int r1, int panel, const float* c, const Linear& m, elem* pool) {
    const Dims& d = w_.d;
    const Bias bias(m, panel);
    const int hp = d.head_panels(), head = panel / hp, sub = panel % hp;
    if (head >= d.heads + d.kv_heads) {
      const int left = d.head_dim - sub * NR;
      elem* values = pool + pool_.value_offset + (head - d.heads - d.kv_heads) * pool_.head_stride + sub * NR;
      for (int r = r0; r < r1; ++r, c += NR) {
        T::store_n(values + ws_.kv_offset[r], vadd(vload(c), bias.x), left);
        T::store_n(values + ws_.kv_offset[r] + W, vadd(vload(c + W), bias.y), left - W);
      }
      return;
    }
    const int left = d.half() - sub * W;
    const float* angles = ws_.angles + (size_t)r0 * 2 * ws_.ld_angle + sub * W;
    const bool is_query = head < d.heads;
    elem* base = is_query ? ws_.query(r0, head, b_.num_tokens) : pool + (head - d.heads) * pool_.head_stride;
    const size_t q_stride = (size_t)d.group() * d.head_dim;
    for (int r = r0; r < r1; ++r, c += NR, angles += 2 * ws_.ld_angle) {
      const vf x = vadd(vload(c), bias.x), y = vadd(vload(c + W), bias.y);
      const vf cosine = vload(angles), sine = vload(angles + ws_.ld_angle);
      elem* out = base + (is_query ? (r - r0) * q_stride : (size_t)ws_.kv_offset[r]) + sub * W;
      T::store_n(out, vnfma(y, sine, vmul(x, cosine)), left);
      T::store_n(out + d.half(), vfma(x, sine, vmul(y, cosine)), left);
    }
  }

  Weights<T> w_;
  Workspace<T> ws_;
  Plan plan_;
  AttentionPhase<T> attention_;
  baton_batch b_ = {};
  PoolShape pool_;
  int64_t phases_done_ = 0;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Team team_;  // last: its threads end before anything that they use
};

}  // namespace baton
