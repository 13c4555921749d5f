// The model's arithmetic: what a thread does for one chunk of a phase (plan.h says which phases there are).
#pragma once
#include <pthread.h>

#include "weights.h"
#include "workspace.h"

namespace baton {

// What the C ABI sees.
class Model {
 public:
  virtual ~Model() = default;
  virtual int load(int role, int layer, const void* data, int64_t rows, int64_t cols) = 0;
  virtual int forward(const baton_batch& batch) = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t workspace_bytes() const = 0;
};

template <class T>
class ModelOf final : public Model, public Job {
 public:
  using elem = typename T::elem;

  explicit ModelOf(const baton_config& c)
      : attention_(c.head_dim, 1.0f / sqrtf((float)c.head_dim)), team_(c.num_threads, c.spin_us) {}

  int init(const baton_config& c) {
    const int rc = w_.init(c);
    if (rc != BATON_OK) return rc;
    ws_.init(w_.d, c.num_threads, attention_.v_cols());
    return team_.start() ? BATON_OK : BATON_NO_MEMORY;
  }

  int load(int role, int layer, const void* data, int64_t rows, int64_t cols) override {
    return w_.load(role, layer, data, rows, cols);
  }
  int64_t weight_bytes() const override { return w_.bytes(); }
  int64_t workspace_bytes() const override { return (int64_t)ws_.bytes(); }

  int forward(const baton_batch& batch) override {
    pthread_mutex_lock(&mutex_);
    int rc = w_.complete() ? check_batch(w_.d, batch) : BATON_NOT_LOADED;
    if (rc == BATON_OK) {
      b_ = batch;
      plan_.build(w_.d, w_.layers[0], w_.lm_head, b_, team_.size(), TILE, attention_.v_cols());
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
    const int t = b_.num_tokens, row0 = chunk * ROWS_PER_CHUNK, row1 = row0 + ROWS_PER_CHUNK < t ? row0 + ROWS_PER_CHUNK : t;
    const auto hidden = [this](int r) { return r; };
    const auto wanted = [this](int r) { return (int)b_.logits_rows[r]; };
    switch (p.op) {
      case Op::EMBED:
        for (int r = row0; r < row1; ++r) embed(r);
        break;
      case Op::INPUT_NORM:
      case Op::POST_NORM:
        norm_rows(row0, row1, p.op == Op::INPUT_NORM ? l.input_norm : l.post_norm, ws_.x, hidden);
        break;
      case Op::QKV: {
        elem* pool = (elem*)b_.kv_pool + (size_t)p.layer * b_.num_blocks * block_stride();
        product(plan_.qkv, chunk, l.qkv, normed(phase, t, l.input_norm, s, hidden), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_qkv(r0, r1, panel, c, l.qkv, pool); });
        break;
      }
      case Op::ATTENTION:
        for (int i = plan_.task_begin(chunk); i < plan_.task_begin(chunk + 1); ++i) attend(i, p.layer, s);
        break;
      case Op::O:
        product(plan_.o, chunk, l.o, ws_.attn, ws_.ld_attn, s,
                [&](int r0, int r1, int panel, const float* c) { add_hidden(r0, r1, panel, c, l.o); });
        break;
      case Op::GATE_UP:
        product(plan_.gate_up, chunk, l.gate_up, normed(phase, t, l.post_norm, s, hidden), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_act(r0, r1, panel, c, l.gate_up); });
        break;
      case Op::DOWN:
        product(plan_.down, chunk, l.down, ws_.act, ws_.ld_act, s,
                [&](int r0, int r1, int panel, const float* c) { add_hidden(r0, r1, panel, c, l.down); });
        break;
      case Op::FINAL_NORM:
        norm_rows(row0, row0 + ROWS_PER_CHUNK < b_.num_logits ? row0 + ROWS_PER_CHUNK : b_.num_logits, w_.final_norm,
                  ws_.x, wanted);
        break;
      case Op::LOGITS:
        product(plan_.lm_head, chunk, w_.lm_head, normed(phase, b_.num_logits, w_.final_norm, s, wanted), ws_.ldx, s,
                [&](int r0, int r1, int panel, const float* c) { store_logits(r0, r1, panel, c); });
        break;
      case Op::GREEDY:
        b_.greedy[chunk] = argmax(b_.logits + (size_t)chunk * w_.d.vocab, w_.d.vocab);
        break;
    }
  }

 private:
  // Elements of the pool: of one block in one layer; of its K half; of one head in it.
  size_t head_stride() const { return (size_t)b_.block_size * w_.d.head_dim; }
  size_t value_offset() const { return (size_t)w_.d.kv_heads * head_stride(); }
  size_t block_stride() const { return 2 * value_offset(); }

  template <class Epilogue>
  void product(const Grid& g, int chunk, const Linear& m, const elem* a, size_t lda, Scratch<T>& s,
               const Epilogue& epilogue) {
    const int r0 = g.row0(chunk), r1 = g.row1(chunk);
    gemm<T>(r1 - r0, (const uint32_t*)(a + (size_t)r0 * lda), lda / T::PER_UNIT, m.w, m.k_units, g.panel0(chunk),
            g.panel1(chunk), s.gemm, [&](int panel, const float* c) { epilogue(r0, r1, panel, c); });
  }

  void embed(int t) {
    const int64_t slot = b_.slot_mapping[t];
    ws_.kv_offset[t] = slot / b_.block_size * (int64_t)block_stride() + slot % b_.block_size * w_.d.head_dim;
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
    Bias(const Linear& m, int panel) : x(vload(m.bias + (size_t)panel * NR)), y(vload(m.bias + (size_t)panel * NR + W)) {}
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
      elem* values = pool + value_offset() + (head - d.heads - d.kv_heads) * head_stride() + sub * NR;
      for (int r = r0; r < r1; ++r, c += NR) {
        T::store_n(values + ws_.kv_offset[r], vadd(vload(c), bias.x), left);
        T::store_n(values + ws_.kv_offset[r] + W, vadd(vload(c + W), bias.y), left - W);
      }
      return;
    }
    const int left = d.half() - sub * W;
    const float* angles = ws_.angles + (size_t)r0 * 2 * ws_.ld_angle + sub * W;
    elem *q = query(r0, head), *keys = pool + (head - d.heads) * (ptrdiff_t)head_stride();
    const size_t q_stride = (size_t)d.group() * d.head_dim;
    for (int r = r0; r < r1; ++r, c += NR, q += q_stride, angles += 2 * ws_.ld_angle) {
      const vf x = vadd(vload(c), bias.x), y = vadd(vload(c + W), bias.y);
      const vf cosine = vload(angles), sine = vload(angles + ws_.ld_angle);
      elem* out = (head < d.heads ? q : keys + ws_.kv_offset[r]) + sub * W;
      T::store_n(out, vnfma(y, sine, vmul(x, cosine)), left);
      T::store_n(out + d.half(), vfma(x, sine, vmul(y, cosine)), left);
    }
  }

  // q is [kv_head][token][head of the group][head_dim]: a task's rows lie evenly apart.
  elem* query(int token, int head) {
    const int g = w_.d.group();
    return ws_.q + (((size_t)(head / g) * b_.num_tokens + token) * g + head % g) * w_.d.head_dim;
  }

  KvView<T> kv_view(const AttentionTask& task, int layer) const {
    const elem* pool = (const elem*)b_.kv_pool + (size_t)layer * b_.num_blocks * block_stride();
    return {pool + task.kv_head * head_stride(), block_stride(),   value_offset(),
            b_.block_tables + (size_t)task.seq * b_.table_width,   b_.block_size,  w_.d.head_dim};
  }

  // Position of the task's first query.
  int start_of(const AttentionTask& task) const {
    return b_.seq_lens[task.seq] - (b_.query_start[task.seq + 1] - b_.query_start[task.seq]) + task.q0;
  }

  void locate(const AttentionTask& task, int tile, int layer, const elem* zeros, Tile<T>* out) const {
    const int base = tile * TILE, left = start_of(task) + task.q1 - task.q0 - base;
    attention_.locate(kv_view(task, layer), base, left < TILE ? left : TILE, zeros, out);
  }

  // The tile after this one: of the same task, else the next task's first (the likely next work of this thread).
  void locate_next(size_t index, int tile, int layer, const elem* zeros, Tile<T>* out) const {
    out->n = 0;
    if (tile + 1 < plan_.tasks[index].tile1)
      locate(plan_.tasks[index], tile + 1, layer, zeros, out);
    else if (index + 1 < plan_.tasks.size())
      locate(plan_.tasks[index + 1], plan_.tasks[index + 1].tile0, layer, zeros, out);
  }

  void attend(size_t index, int layer, Scratch<T>& scratch) {
    const AttentionTask& task = plan_.tasks[index];
    AttentionScratch<T>& s = scratch.attention;
    const int group = w_.d.group(), rows = (task.q1 - task.q0) * group, first = b_.query_start[task.seq] + task.q0;
    const uint32_t* q = (const uint32_t*)query(first, task.kv_head * group);
    const size_t stride = (size_t)w_.d.head_dim / T::PER_UNIT, cols = attention_.v_cols();
    locate(task, task.tile0, layer, s.zeros, &s.tiles[0]);
    for (int i = task.tile0; i < task.tile1; ++i) {
      const Tile<T>& tile = s.tiles[(i - task.tile0) & 1];
      Tile<T>& next = s.tiles[(i - task.tile0 + 1) & 1];
      locate_next(index, i, layer, s.zeros, &next);
      float *acc = s.acc, *max = s.max, *sum = s.sum;
      if (task.group >= 0) {
        acc = partial(task.group, i);
        max = acc + rows * cols;
        sum = max + rows;
      }
      if (rows > MR) attention_.pack(tile, next, value_offset(), s);
      for (int r0 = 0, m; r0 < rows; r0 += m) {
        m = rows - r0 < MR ? rows - r0 : MR;
        int limit[MR];
        for (int r = 0; r < m; ++r) {
          const int seen = start_of(task) + (r0 + r) / group + 1 - tile.base;
          limit[r] = seen < tile.n ? seen : tile.n;
        }
        const bool fresh = i == 0 || task.group >= 0;
        if (rows > MR)
          attention_.attend_packed(q + r0 * stride, stride, m, limit, s, acc + r0 * cols, max + r0, sum + r0, fresh);
        else
          attention_.attend_few(q, stride, m, limit, tile, next, value_offset(), s, acc, max, sum, fresh);
      }
    }
    if (task.group < 0)
      store_attention(task, rows, first, s.acc, s.sum);
    else if ((ws_.arrivals[task.group].fetch_add(1) + 1) % plan_.groups[task.group].tasks == 0)
      merge_group(task, rows, first, s);
  }

  float* partial(int group, int tile) {
    const SplitGroup& g = plan_.groups[group];
    return ws_.partials + g.partial + (size_t)tile * g.partial_size;
  }

  void merge_group(const AttentionTask& task, int rows, int first, AttentionScratch<T>& s) {
    const size_t cols = attention_.v_cols();
    for (int tile = 0; tile < plan_.groups[task.group].tiles; ++tile) {
      const float *out = partial(task.group, tile), *max = out + rows * cols, *sum = max + rows;
      for (int r = 0; r < rows; ++r)
        if (start_of(task) + r / w_.d.group() + 1 > tile * TILE)
          attention_.merge(out + r * cols, max[r], sum[r], s.acc + r * cols, s.max + r, s.sum + r, tile == 0);
    }
    store_attention(task, rows, first, s.acc, s.sum);
  }

  void store_attention(const AttentionTask& task, int rows, int first, const float* acc, const float* sum) {
    const int group = w_.d.group();
    for (int r = 0; r < rows; ++r)
      attention_.finish(acc + (size_t)r * attention_.v_cols(), sum[r],
                        ws_.attn + (size_t)(first + r / group) * ws_.ld_attn +
                            (size_t)(task.kv_head * group + r % group) * w_.d.head_dim);
  }

  Weights<T> w_;
  Workspace<T> ws_;
  Attention<T> attention_;
  Plan plan_;
  baton_batch b_ = {};
  int64_t phases_done_ = 0;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Team team_;  // last: its threads end before anything that they use
};

}  // namespace baton
