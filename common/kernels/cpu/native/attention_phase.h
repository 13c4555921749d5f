// The attention phase of a step: tasks (plan.h) over the paged pool, done tile by tile (attention.h).
#pragma once
#include "workspace.h"

namespace baton {

template <class T>
class AttentionPhase {
 public:
  using elem = typename T::elem;

  AttentionPhase(const Dims& d, const Plan& plan, Workspace<T>& ws)
      : d_(d), plan_(&plan), ws_(&ws), math_(d.head_dim, 1.0f / sqrtf((float)d.head_dim)) {}

  int v_cols() const { return math_.v_cols(); }

  void begin_step(const baton_batch& batch) {
    b_ = &batch;
    pool_ = PoolShape(d_, batch);
  }

  // Task `index` of the plan, in one layer; the heads' results go to the workspace's attn.
  void attend(size_t index, int layer, Scratch<T>& scratch) {
    const AttentionTask& task = plan_->tasks[index];
    AttentionScratch<T>& s = scratch.attention;
    const int group = d_.group(), rows = (task.q1 - task.q0) * group, first = b_->query_start[task.seq] + task.q0;
    const uint32_t* q = (const uint32_t*)ws_->query(first, task.kv_head * group, b_->num_tokens);
    const size_t stride = (size_t)d_.head_dim / T::PER_UNIT, cols = math_.v_cols();
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
      if (rows > MR) math_.pack(tile, next, pool_.value_offset, s);
      for (int r0 = 0, m; r0 < rows; r0 += m) {
        m = rows - r0 < MR ? rows - r0 : MR;
        int limit[MR];
        for (int r = 0; r < m; ++r) {
          const int seen = start_of(task) + (r0 + r) / group + 1 - tile.base;
          limit[r] = seen < tile.n ? seen : tile.n;
        }
        const bool fresh = i == 0 || task.group >= 0;
        if (rows > MR)
          math_.attend_packed(q + r0 * stride, stride, m, limit, s, acc + r0 * cols, max + r0, sum + r0, fresh);
        else
          math_.attend_few(q, stride, m, limit, tile, next, pool_.value_offset, s, acc, max, sum, fresh);
      }
    }
    if (task.group < 0)
      store_attention(task, rows, first, s.acc, s.sum);
    else if ((ws_->arrivals[task.group].fetch_add(1) + 1) % plan_->groups[task.group].tasks == 0)
      merge_group(task, rows, first, s);
  }

 private:
  KvView<T> kv_view(const AttentionTask& task, int layer) const {
    const elem* pool = (const elem*)b_->kv_pool + (size_t)layer * b_->num_blocks * pool_.block_stride;
    const int32_t* table = b_->block_tables + (size_t)task.seq * b_->table_width;
    const elem* keys = pool + task.kv_head * pool_.head_stride;
    return {keys, pool_.block_stride, pool_.value_offset, table, b_->block_size, d_.head_dim};
  }

  // Position of the task's first query.
  int start_of(const AttentionTask& task) const {
    return b_->seq_lens[task.seq] - (b_->query_start[task.seq + 1] - b_->query_start[task.seq]) + task.q0;
  }

  void locate(const AttentionTask& task, int tile, int layer, const elem* zeros, Tile<T>* out) const {
    const int base = tile * TILE, left = start_of(task) + task.q1 - task.q0 - base;
    math_.locate(kv_view(task, layer), base, left < TILE ? left : TILE, zeros, out);
  }

  // The tile after this one: of the same task, else the next task's first (the likely next work of this thread).
  void locate_next(size_t index, int tile, int layer, const elem* zeros, Tile<T>* out) const {
    out->n = 0;
    if (tile + 1 < plan_->tasks[index].tile1)
      locate(plan_->tasks[index], tile + 1, layer, zeros, out);
    else if (index + 1 < plan_->tasks.size())
      locate(plan_->tasks[index + 1], plan_->tasks[index + 1].tile0, layer, zeros, out);
  }

  float* partial(int group, int tile) {
    const SplitGroup& g = plan_->groups[group];
    return ws_->partials + g.partial + (size_t)tile * g.partial_size;
  }

  void merge_group(const AttentionTask& task, int rows, int first, AttentionScratch<T>& s) {
    const size_t cols = math_.v_cols();
    for (int tile = 0; tile < plan_->groups[task.group].tiles; ++tile) {
      const float *out = partial(task.group, tile), *max = out + rows * cols, *sum = max + rows;
      for (int r = 0; r < rows; ++r)
        if (start_of(task) + r / d_.group() + 1 > tile * TILE)
          math_.merge(out + r * cols, max[r], sum[r], s.acc + r * cols, s.max + r, s.sum + r, tile == 0);
    }
    store_attention(task, rows, first, s.acc, s.sum);
  }

  void store_attention(const AttentionTask& task, int rows, int first, const float* acc, const float* sum) {
    const int group = d_.group();
    for (int r = 0; r < rows; ++r) {
      const size_t column = (size_t)(task.kv_head * group + r % group) * d_.head_dim;
      math_.finish(acc + (size_t)r * math_.v_cols(), sum[r],
                   ws_->attn + (size_t)(first + r / group) * ws_->ld_attn + column);
    }
  }

  const Dims d_;
  const Plan* plan_;
  Workspace<T>* ws_;
  const baton_batch* b_ = nullptr;
  PoolShape pool_;
  const Attention<T> math_;
};

}  // namespace baton
