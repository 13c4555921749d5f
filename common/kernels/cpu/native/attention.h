// Paged causal attention with grouped heads, one code for prefill chunks and decodes.
//
// Work is (sequence, KV head, range of query tokens); its rows are (token, head of the group) pairs, token-major. The
// context is cut into tiles of TILE positions at fixed places:
//
//   position   0 ........ 255 | 256 ...... 511 | 512 ..          a tile alone gives (max, sum, output) per row;
//                 tile 0           tile 1                        tiles are merged in ascending order
//
// A tile's result depends on the row's own query and on the keys up to its position alone, so neither the chunking, nor
// the batch, nor who computes a tile (decodes of long contexts are split over threads by tiles) changes a bit.
// Online softmax: Milakov & Gimelshein 2018; tiling: FlashAttention-2 (Dao 2023); split KV: Flash-Decoding (2023).
#pragma once
#include "elementwise.h"
#include "gemm.h"

namespace baton {

constexpr int TILE = 256;
constexpr int STRIDE = TILE + 16;  // of score and probability rows: keeps their cache sets apart
constexpr int STEP = 2 * NR;       // positions that few rows pack and use at a time

// One layer's KV of one sequence and KV head.
template <class T>
struct KvView {
  const typename T::elem* keys;  // of block 0; token t of block b: keys + b * block_stride + t * head_dim
  size_t block_stride, value_offset;
  const int32_t* blocks;
  int block_size, head_dim;

  // Where the keys of positions [base, base + n) lie.
  void rows(int base, int n, const typename T::elem** out) const {
    int block = base / block_size, offset = base % block_size;
    for (int i = 0; i < n; ++block, offset = 0) {
      const typename T::elem* p = keys + (size_t)blocks[block] * block_stride + (size_t)offset * head_dim;
      for (; offset < block_size && i < n; ++offset, p += head_dim) out[i++] = p;
    }
  }
};

// A tile's key rows; `rows` is padded with a row of zeros up to a multiple of STEP.
template <class T>
struct Tile {
  const typename T::elem* rows[TILE];
  int base, n;  // n = 0: none
};

// One thread's buffers. A task has at most `rows` rows.
template <class T>
struct AttentionScratch {
  uint32_t *k, *v;                // packed: [TILE / NR][dim_units][NR] and [v_panels][TILE / PER_UNIT][NR]
  float* scores;                  // [MR][STRIDE]
  uint32_t* probs;                // [MR][STRIDE] units
  float* out;                     // [MR][v_cols]
  float *acc, *max, *sum;         // [rows][v_cols], [rows], [rows]
  Tile<T>* tiles;                 // [2]: the tile at work, and the one that comes next
  const typename T::elem* zeros;  // [head_dim]
};

template <class T>
class Attention {
 public:
  using elem = typename T::elem;
  Attention(int head_dim, float scale)
      : dim_(head_dim),
        dim_units_(ceil_div(head_dim, T::PER_UNIT)),
        v_panels_(ceil_div(head_dim, NR)),
        v_cols_(v_panels_ * NR),
        scale_log2_(scale * 1.4426950408889634f) {}

  int v_cols() const { return v_cols_; }

  void locate(const KvView<T>& kv, int base, int n, const elem* zeros, Tile<T>* tile) const {
    tile->base = base;
    tile->n = n;
    kv.rows(base, n, tile->rows);
    for (int i = n; i % STEP != 0; ++i) tile->rows[i] = zeros;
  }

  // Packs a whole tile into s.k and s.v, for attend_packed.
  void pack(const Tile<T>& tile, const Tile<T>& next, size_t value_offset, AttentionScratch<T>& s) const {
    for (int i = 0; i < tile.n; i += STEP) pack_keys(tile, next, i, 0, s.k + (size_t)i * dim_units_);
    pack_values(tile, next, 0, tile.n, value_offset, s.zeros, s.v, v_panel(TILE));
  }

  // Rows q[0 .. m) (m <= MR, `stride` units apart) against the packed tile; row i sees its first limit[i] positions
  // (<= tile.n; <= 0: none). Merges into (or, where `fresh`, sets) acc, max, sum of each row.
  void attend_packed(const uint32_t* q, size_t stride, int m, const int* limit, AttentionScratch<T>& s, float* acc,
                     float* max, float* sum, bool fresh) const {
    const int most = highest(limit, m);
    if (most <= 0) return;
    const int step = max_panels(m) >= 2 ? 2 : 1;
    for (int p = 0, np, panels = ceil_div(most, NR); p < panels; p += np) {
      np = p + step <= panels ? step : 1;
      micro_for<T>(m, np)(dim_units_, q, stride, s.k + (size_t)p * NR * dim_units_, (size_t)NR * dim_units_,
                          s.scores + p * NR, STRIDE, false, {});
    }
    float tile_max[MR], tile_sum[MR];
    softmax(m, limit, most, s, tile_max, tile_sum);
    weigh(m, ceil_div(most, T::PER_UNIT), s.probs, s.v, v_panel(TILE), s.out, false);
    merge_rows(m, limit, s.out, tile_max, tile_sum, acc, max, sum, fresh);
  }

  // The same for rows few enough that packing is most of the work: packs and uses STEP positions at a time, which stay
  // in the first cache, and fetches the next tile's lines meanwhile.
  void attend_few(const uint32_t* q, size_t stride, int m, const int* limit, const Tile<T>& tile, const Tile<T>& next,
                  size_t value_offset, AttentionScratch<T>& s, float* acc, float* max, float* sum, bool fresh) const {
    const int most = highest(limit, m);
    const int np = max_panels(m) >= 2 ? 2 : 1;
    const size_t panel = (size_t)NR * dim_units_;
    for (int i = 0; i < most; i += STEP) {
      pack_keys(tile, next, i, value_offset, s.k);
      for (int p = 0; p < 2; p += np)
        micro_for<T>(m, np)(dim_units_, q, stride, s.k + p * panel, panel, s.scores + i + p * NR, STRIDE, false, {});
    }
    float tile_max[MR], tile_sum[MR];
    softmax(m, limit, most, s, tile_max, tile_sum);
    for (int i = 0; i < most; i += STEP) {
      const int n = most - i < STEP ? most - i : STEP;
      pack_values(tile, next, i, n, value_offset, s.zeros, s.v, v_panel(STEP));
      weigh(m, ceil_div(n, T::PER_UNIT), s.probs + i / T::PER_UNIT, s.v, v_panel(STEP), s.out, i > 0);
    }
    merge_rows(m, limit, s.out, tile_max, tile_sum, acc, max, sum, fresh);
  }

  // (acc, max, sum) += one more tile's (out, tile_max, tile_sum); set where `fresh`.
  void merge(const float* out, float tile_max, float tile_sum, float* acc, float* max, float* sum, bool fresh) const {
    if (fresh) {
      for (int d = 0; d < v_cols_; d += W) vstore(acc + d, vload(out + d));
      *max = tile_max;
      *sum = tile_sum;
      return;
    }
    const float top = *max > tile_max ? *max : tile_max;
    const vf a = vexp2<T>(vset((*max - top) * scale_log2_)), b = vexp2<T>(vset((tile_max - top) * scale_log2_));
    for (int d = 0; d < v_cols_; d += W) vstore(acc + d, vfma(vload(out + d), b, vmul(vload(acc + d), a)));
    *sum = vfirst(vfma(vset(tile_sum), b, vmul(vset(*sum), a)));
    *max = top;
  }

  // The row's result, normalised, to out[head_dim].
  void finish(const float* acc, float sum, elem* out) const {
    const vf inverse = vset(1.0f / sum);
    for (int d = 0; d < dim_; d += NR) {
      vf x = vmul(vload(acc + d), inverse), y = vmul(vload(acc + d + W), inverse);
      if (T::PER_UNIT == 2) vunpair(x, y, &x, &y);
      T::store_n(out + d, x, dim_ - d);
      T::store_n(out + d + W, y, dim_ - d - W);
    }
  }

 private:
  static size_t v_panel(int positions) { return (size_t)(positions / T::PER_UNIT) * NR; }

  static int highest(const int* limit, int m) {
    int most = 0;
    for (int i = 0; i < m; ++i) most = limit[i] > most ? limit[i] : most;
    return most;
  }

  // The rows of `next` at the places of [i, i + n), to be fetched meanwhile; null where it has fewer.
  static const elem* const* ahead(const Tile<T>& next, int i, int n) {
    return i + n <= next.n ? next.rows + i : nullptr;
  }

  static void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

  // STEP positions' keys from i on, transposed: out[panel][unit][position]. A CPU drops fetches that come faster than
  // memory answers, so they are spread: each line of the next tile's keys is asked for when its neighbour here is read,
  // and (value_offset > 0) this tile's values once more, for those that were dropped.
  void pack_keys(const Tile<T>& tile, const Tile<T>& next, int i, size_t value_offset, uint32_t* out) const {
    const elem* const* later = ahead(next, i, STEP);
    for (int h = 0; h < STEP; h += W) {
      const elem* const* rows = tile.rows + i + h;
      uint32_t* dst = out + (size_t)(h / NR) * NR * dim_units_ + h % NR;
      for (int u = 0; u < dim_units_; u += W) {
        const int left = dim_units_ - u;
        vi r[W];
        for (int j = 0; j < W; ++j) r[j] = vload_u_n((const uint32_t*)rows[j] + u, left);
        if (later)
          for (int j = 0; j < W; ++j) fetch((const uint32_t*)later[h + j] + u);
        if (value_offset > 0)
          for (int j = 0; j < W; ++j) fetch((const uint32_t*)(rows[j] + value_offset) + u);
        transpose(r);
        if (left >= W) {
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) vstore_u(dst + (size_t)(u + j) * NR, r[j]);
        } else {
          for (int j = 0; j < left; ++j) vstore_u(dst + (size_t)(u + j) * NR, r[j]);
        }
      }
    }
  }

  // The values of n positions from i on: out[panel][unit][column]. bfloat16: columns in vpair's order.
  void pack_values(const Tile<T>& tile, const Tile<T>& next, int i, int n, size_t offset, const elem* zeros,
                   uint32_t* out, size_t panel) const {
    const elem* const* later = ahead(next, i, n);
    for (int j = 0; j < n; j += T::PER_UNIT, out += NR) {
      const elem *a = tile.rows[i + j] + offset, *b = j + 1 < n ? tile.rows[i + j + 1] + offset : zeros;
      for (int d = 0, p = 0; d < dim_; d += NR, ++p) {
        if (later)
          for (int e = 0; e < T::PER_UNIT && j + e < n; ++e) fetch(later[j + e] + offset + d);
        vi x, y;
        if constexpr (T::PER_UNIT == 1) {
          x = vload_u_n((const uint32_t*)a + d, dim_ - d);
          y = vload_u_n((const uint32_t*)a + d + W, dim_ - d - W);
        } else {
          vpair(a + d, b + d, dim_ - d, &x, &y);
        }
        vstore_u(out + p * panel, x);
        vstore_u(out + p * panel + W, y);
      }
    }
  }

  // out[m][v_cols] (+)= probs * values over `units` units.
  void weigh(int m, int units, const uint32_t* probs, const uint32_t* v, size_t panel, float* out,
             bool accumulate) const {
    const int step = max_panels(m) >= 2 ? 2 : 1;
    for (int p = 0, np; p < v_panels_; p += np) {
      np = p + step <= v_panels_ ? step : 1;
      micro_for<T>(m, np)(units, probs, STRIDE, v + p * panel, panel, out + p * NR, v_cols_, accumulate, {});
    }
  }

  void softmax(int m, const int* limit, int most, AttentionScratch<T>& s, float* max, float* sum) const {
    const int padded = (int)round_up(most, NR);
    for (int i = 0; i < m; ++i)
      softmax_row(s.scores + i * STRIDE, limit[i], padded, (elem*)(s.probs + (size_t)i * STRIDE), max + i, sum + i);
  }

  // probs[0:limit) = exp2((score - max) * scale_log2), zero up to `padded`.
  void softmax_row(const float* scores, int limit, int padded, elem* probs, float* max_out, float* sum_out) const {
    vf top = vset(-INFINITY);
    int i = 0;
    for (; i + W <= limit; i += W) top = vmax(top, vload(scores + i));
    if (i < limit) top = vmax(top, vkeep(vload(scores + i), limit - i, vset(-INFINITY)));
    const float max = limit > 0 ? vhmax(top) : 0.0f;
    const vf scale = vset(scale_log2_), bias = vset(-max * scale_log2_);
    vf sum = vzero();
    for (i = 0; i + W <= limit; i += W) {
      const vf p = vexp2<T>(vfma(vload(scores + i), scale, bias));
      sum = vadd(sum, p);
      T::store(probs + i, p);
    }
    for (; i < padded; i += W) {
      const vf p = i < limit ? vkeep(vexp2<T>(vfma(vload(scores + i), scale, bias)), limit - i, vzero()) : vzero();
      sum = vadd(sum, p);
      T::store(probs + i, p);
    }
    *max_out = max;
    *sum_out = vsum(sum);
  }

  void merge_rows(int m, const int* limit, const float* out, const float* tile_max, const float* tile_sum, float* acc,
                  float* max, float* sum, bool fresh) const {
    for (int i = 0; i < m; ++i)
      if (limit[i] > 0)
        merge(out + (size_t)i * v_cols_, tile_max[i], tile_sum[i], acc + (size_t)i * v_cols_, max + i, sum + i, fresh);
  }

  const int dim_, dim_units_, v_panels_, v_cols_;
  const float scale_log2_;
};

}  // namespace baton
