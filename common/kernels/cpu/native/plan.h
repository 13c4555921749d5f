// The plan of one step: its phases, how each is cut into chunks, and who attends to what. No arithmetic of the model.
//
// T tokens, R wanted rows; per layer:
//   EMBED      token rows -> hidden (f32); rotation angles                       once
//   NORM       hidden -> x                  a phase for many tokens only; else each thread normalises for itself
//   CODE       attn, or act -> int8 codes   likewise, and beside quantised weights only; NORM codes its own rows
//   QKV        x -> q (rotated); K (rotated) and V into their slots of the pool
//   ATTENTION  q, pool -> attn
//   O          attn -> hidden +=
//   NORM, GATE_UP   hidden -> x -> act = silu(gate) * up
//   DOWN       act -> hidden +=
//   FINAL_NORM, LOGITS, GREEDY   of the wanted rows                              once
#pragma once
#include <vector>

#include "gemm.h"
#include "team.h"
#include "abi.h"
#include "packing.h"

namespace baton {

enum class Op : uint8_t {
  EMBED, INPUT_NORM, QKV, ATTENTION, CODE_ATTN, O, POST_NORM, GATE_UP, CODE_ACT, DOWN, FINAL_NORM, LOGITS, GREEDY
};

struct Phase {
  Op op;
  int layer;
};

// A matrix product in chunks: blocks of rows x groups of panels, a block's groups next to each other.
struct Grid {
  int rows, panels, blocks, groups;

  Grid() = default;
  Grid(int rows, const Linear& m, int threads) : rows(rows), panels(m.panels) {
    blocks = ceil_div(rows, block_rows(m.k_units));
    groups = ceil_div(CHUNKS_PER_THREAD * threads, blocks);
    if (groups > panels) groups = panels;
  }
  int chunks() const { return blocks * groups; }
  int row0(int chunk) const { return tile_begin(rows, blocks, chunk / groups); }
  int row1(int chunk) const { return tile_begin(rows, blocks, chunk / groups + 1); }
  int panel0(int chunk) const { return tile_begin(panels, groups, chunk % groups); }
  int panel1(int chunk) const { return tile_begin(panels, groups, chunk % groups + 1); }

  static constexpr int CHUNKS_PER_THREAD = 8;
};

// Queries [q0, q1) of a sequence's new tokens, one KV head, context tiles [tile0, tile1). group >= 0: the tiles of
// these queries are shared out over several tasks.
struct AttentionTask {
  int seq, kv_head, q0, q1, tile0, tile1, group;
};

// Tasks that share queries: each leaves its tiles' results at partial + tile * partial_size; the last one merges.
struct SplitGroup {
  size_t partial, partial_size;
  int tiles, tasks;
};

constexpr int OWN_NORM_ROWS = 16;  // up to here every thread normalises for itself
constexpr int TASK_ROWS = 192;     // most (token, head) rows of an attention task
constexpr int ROWS_PER_CHUNK = 16;  // of row-wise phases

class Plan {
 public:
  std::vector<Phase> phases;
  std::vector<int> chunks;
  std::vector<AttentionTask> tasks;
  std::vector<SplitGroup> groups;
  size_t partial_floats = 0;
  Grid qkv, o, gate_up, down, lm_head;

  void build(const Dims& d, const Layer& l, const Linear& head, const baton_batch& b, int threads, int tile,
             int v_cols, bool coded) {
    const int t = b.num_tokens, r = b.num_logits, row_chunks = ceil_div(t, ROWS_PER_CHUNK);
    qkv = Grid(t, l.qkv, threads);
    o = Grid(t, l.o, threads);
    gate_up = Grid(t, l.gate_up, threads);
    down = Grid(t, l.down, threads);
    plan_attention(d, b, threads, tile, v_cols);
    phases.clear();
    chunks.clear();
    add(Op::EMBED, 0, row_chunks);
    for (int i = 0; i < d.layers; ++i) {
      if (t > OWN_NORM_ROWS) add(Op::INPUT_NORM, i, row_chunks);
      add(Op::QKV, i, qkv.chunks());
      add(Op::ATTENTION, i, attention_chunks());
      if (coded && t > OWN_NORM_ROWS) add(Op::CODE_ATTN, i, row_chunks);
      add(Op::O, i, o.chunks());
      if (t > OWN_NORM_ROWS) add(Op::POST_NORM, i, row_chunks);
      add(Op::GATE_UP, i, gate_up.chunks());
      if (coded && t > OWN_NORM_ROWS) add(Op::CODE_ACT, i, row_chunks);
      add(Op::DOWN, i, down.chunks());
    }
    if (r == 0) return;
    lm_head = Grid(r, head, threads);
    if (r > OWN_NORM_ROWS) add(Op::FINAL_NORM, 0, ceil_div(r, ROWS_PER_CHUNK));
    add(Op::LOGITS, 0, lm_head.chunks());
    if (b.greedy) add(Op::GREEDY, 0, r);
  }

  int attention_chunks() const { return (int)tasks.size() < MAX_CHUNKS ? (int)tasks.size() : MAX_CHUNKS; }
  int task_begin(int chunk) const { return (int)(tasks.size() * (size_t)chunk / attention_chunks()); }

 private:
  void add(Op op, int layer, int n) {
    phases.push_back({op, layer});
    chunks.push_back(n);
  }

  void plan_attention(const Dims& d, const baton_batch& b, int threads, int tile, int v_cols) {
    tasks.clear();
    groups.clear();
    partial_floats = 0;
    const int group = d.group(), most = TASK_ROWS / group > 0 ? TASK_ROWS / group : 1, wanted = 8 * threads;
    int per_task = ceil_div((int)((int64_t)b.num_tokens * d.kv_heads / wanted), 4) * 4;
    per_task = per_task < 4 ? 4 : per_task > most ? most : per_task;
    const int spare = wanted / (b.num_sequences * d.kv_heads);  // tasks that a sequence's head may become
    for (int s = 0; s < b.num_sequences; ++s) {
      const int n = b.query_start[s + 1] - b.query_start[s], tiles = ceil_div(b.seq_lens[s], tile);
      for (int h = 0; h < d.kv_heads; ++h) {
        const int pieces = tiles < spare ? tiles : spare;
        if (n <= per_task && pieces > 1) {
          split(s, h, n, tiles, pieces, (size_t)n * group * (v_cols + 2));
          continue;
        }
        for (int q = 0; q < n; q += per_task) {
          const int end = q + per_task < n ? q + per_task : n;
          tasks.push_back({s, h, q, end, 0, ceil_div(b.seq_lens[s] - n + end, tile), -1});
        }
      }
    }
  }

  void split(int seq, int head, int n, int tiles, int pieces, size_t partial_size) {
    for (int i = 0; i < pieces; ++i)
      tasks.push_back({seq, head, 0, n, tile_begin(tiles, pieces, i), tile_begin(tiles, pieces, i + 1),
                       (int)groups.size()});
    groups.push_back({partial_floats, partial_size, tiles, pieces});
    partial_floats += partial_size * tiles;
  }
};

// Distances in a layer's pool, in elements: of blocks, of a block's halves (K, then V), of KV heads in a half.
struct PoolShape {
  size_t block_stride = 0, value_offset = 0, head_stride = 0;

  PoolShape() = default;
  PoolShape(const Dims& d, const baton_batch& b)
      : block_stride(2 * (size_t)d.kv_heads * b.block_size * d.head_dim),
        value_offset((size_t)d.kv_heads * b.block_size * d.head_dim),
        head_stride((size_t)b.block_size * d.head_dim) {}
};

// What a batch must hold to be computed without reading or writing outside its buffers.
static inline int check_batch(const Dims& d, const baton_batch& b) {
  if (b.num_tokens < 1 || b.num_sequences < 1 || b.block_size < 1 || b.table_width < 1 || b.num_logits < 0)
    return BATON_BAD_LENGTHS;
  if (b.query_start[0] != 0 || b.query_start[b.num_sequences] != b.num_tokens) return BATON_BAD_LENGTHS;
  const int64_t slots = (int64_t)b.num_blocks * b.block_size;
  for (int t = 0; t < b.num_tokens; ++t) {
    if (b.token_ids[t] < 0 || b.token_ids[t] >= d.vocab) return BATON_BAD_TOKEN;
    if (b.positions[t] < 0) return BATON_BAD_POSITION;
    if (b.slot_mapping[t] < 0 || b.slot_mapping[t] >= slots) return BATON_BAD_SLOT;
  }
  for (int s = 0; s < b.num_sequences; ++s) {
    const int n = b.query_start[s + 1] - b.query_start[s];
    if (n < 1 || b.seq_lens[s] < n || ceil_div(b.seq_lens[s], b.block_size) > b.table_width) return BATON_BAD_LENGTHS;
    const int32_t* table = b.block_tables + (size_t)s * b.table_width;
    for (int i = 0; i < ceil_div(b.seq_lens[s], b.block_size); ++i)
      if (table[i] < 0 || table[i] >= b.num_blocks) return BATON_BAD_BLOCK;
  }
  for (int r = 0; r < b.num_logits; ++r)
    if (b.logits_rows[r] < 0 || b.logits_rows[r] >= b.num_tokens) return BATON_BAD_ROW;
  return BATON_OK;
}

}  // namespace baton
