// The buffers of one step, kept from step to step and grown when a step needs more.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "plan.h"

namespace baton {

// A row stride in units: whole cache lines, an odd number of them, so that a tile's rows fall into different sets.
static inline size_t row_units(int columns, int per_unit) {
  return ((round_up(ceil_div(columns, per_unit), 16) / 16) | 1) * 16;
}

template <class T>
struct Scratch {
  typename T::elem* x;         // [OWN_NORM_ROWS][ldx]: this thread's normalised rows
  int64_t x_made_for;          // the phase (counted over the model's life) that x belongs to
  float* gemm;                 // [MAX_ROWS][NR]
  uint32_t* codes;             // [OWN_NORM_ROWS] of the longest: this thread's coded rows
  int64_t codes_made_for;      // as x_made_for
  float* decoded;              // [longest k][NR]
  AttentionScratch<T> attention;
};

template <class T>
class Workspace {
 public:
  using elem = typename T::elem;
  // Row strides in elements. hidden and angles are float.
  size_t ldx, ld_attn, ld_act, ld_hidden, ld_angle;
  float *hidden, *angles, *partials;  // angles: [T][cosines, sines]
  elem *x, *q, *attn, *act;
  uint32_t* codes;  // rows of one matrix, coded
  int64_t* kv_offset;  // of each token's slot in a layer's pool: K of KV head 0
  std::vector<Scratch<T>> scratch;
  std::unique_ptr<std::atomic<int>[]> arrivals;  // tasks that ended, of each split group, over the layers of a step

  // quantised: there are codes of rows, or of panels decoded, to hold.
  void init(const Dims& d, int threads, int v_cols, bool quantised) {
    const auto elements = [](int columns) { return row_units(columns, T::PER_UNIT) * T::PER_UNIT; };
    d_ = d;
    v_cols_ = v_cols;
    const int q = d.heads * d.head_dim, longest = d.inter > d.hidden ? d.inter : d.hidden;
    longest_ = !quantised ? 0 : longest > q ? longest : q;
    ldx = elements(d.hidden);
    ld_attn = elements(d.heads * d.head_dim);
    ld_act = elements((int)round_up(d.inter, W));
    ld_hidden = round_up(d.hidden, W);
    ld_angle = round_up(d.half(), W);
    scratch.assign(threads, Scratch<T>{});
  }

  // Room for t tokens, r wanted rows and the plan's partial results. False: no memory.
  bool reserve(int t, int r, const Plan& plan) {
    if ((int)plan.groups.size() > num_arrivals_) {
      num_arrivals_ = (int)plan.groups.size() * 2;
      arrivals.reset(new std::atomic<int>[num_arrivals_]);
    }
    for (size_t i = 0; i < plan.groups.size(); ++i) arrivals[i].store(0, std::memory_order_relaxed);
    const bool fits = t <= tokens_ && r <= rows_ && plan.partial_floats <= partial_floats_;
    if (fits) return true;
    tokens_ = grown(tokens_, t);
    rows_ = grown(rows_, r);
    partial_floats_ = grown(partial_floats_, plan.partial_floats);
    size_t bytes = 0;
    place(nullptr, &bytes);
    if (!arena_.reserve(bytes)) {
      tokens_ = rows_ = 0;
      partial_floats_ = 0;
      return false;
    }
    place(&arena_, &bytes);
    for (Scratch<T>& s : scratch) s.x_made_for = s.codes_made_for = -1;
    return true;
  }

  size_t bytes() const { return arena_.size(); }

  // q is [kv_head][token][head of the group][head_dim]: an attention task's rows lie evenly apart.
  elem* query(int token, int head, int num_tokens) {
    const int g = d_.group();
    return q + (((size_t)(head / g) * num_tokens + token) * g + head % g) * d_.head_dim;
  }

 private:
  // By half as much again at least, so that slowly growing batches seldom cost new memory.
  template <class N>
  static N grown(N have, N need) {
    const N more = have + have / 2;
    return need <= have ? have : need > more ? need : more;
  }

  void place(Arena* arena, size_t* bytes) {
    const auto take = [&](auto*& p, size_t n) {
      using E = typename std::remove_reference<decltype(*p)>::type;
      *bytes += Arena::need<E>(n);
      if (arena) p = arena->take<E>(n);
    };
    const size_t t = tokens_, x_rows = tokens_ > rows_ ? tokens_ : rows_;
    const int dim_units = ceil_div(d_.head_dim, T::PER_UNIT);
    const int task_rows = TASK_ROWS > d_.group() ? TASK_ROWS : d_.group();
    *bytes = 0;
    take(hidden, t * ld_hidden);
    take(angles, t * 2 * ld_angle);
    take(x, x_rows * ldx);
    take(q, t * d_.heads * d_.head_dim);
    take(attn, t * ld_attn);
    take(act, t * ld_act);
    take(kv_offset, t);
    take(partials, partial_floats_);
    const size_t ld_codes = longest_ > 0 && T::CODES_ROWS ? coded_row_units(longest_) : 0;
    take(codes, x_rows * ld_codes);
    for (Scratch<T>& s : scratch) {
      AttentionScratch<T>& a = s.attention;
      take(s.x, OWN_NORM_ROWS * ldx);
      take(s.gemm, (size_t)MAX_ROWS * NR);
      take(s.codes, OWN_NORM_ROWS * ld_codes);
      take(s.decoded, T::CODES_ROWS ? 0 : (size_t)longest_ * NR);
      take(a.k, (size_t)TILE * round_up(dim_units, W));
      take(a.v, (size_t)TILE * v_cols_);
      take(a.scores, (size_t)MR * STRIDE);
      take(a.probs, (size_t)MR * STRIDE);
      take(a.out, (size_t)MR * v_cols_);
      take(a.acc, (size_t)task_rows * v_cols_);
      take(a.max, task_rows);
      take(a.sum, task_rows);
      take(a.tiles, 2);
      take(a.zeros, d_.head_dim);
    }
  }

  Dims d_;
  int v_cols_ = 0, longest_ = 0, tokens_ = 0, rows_ = 0, num_arrivals_ = 0;
  size_t partial_floats_ = 0;
  Arena arena_;
};

}  // namespace baton
