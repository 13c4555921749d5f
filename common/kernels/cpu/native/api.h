/* C ABI of the CPU executor. Plain declarations only: Python's cffi reads this very file.
 *
 * Calls return 0 or one of the codes below. A model belongs to its creator; forward may be called from any thread,
 * one call at a time (a second caller waits). Pointers in a batch must stay valid for the call only.
 */

enum {
  BATON_OK = 0,
  BATON_NO_MEMORY = 1,
  BATON_BAD_CONFIG = 2,
  BATON_BAD_SHAPE = 3,
  BATON_BAD_TOKEN = 4,
  BATON_BAD_POSITION = 5,
  BATON_BAD_SLOT = 6,
  BATON_BAD_LENGTHS = 7,
  BATON_BAD_BLOCK = 8,
  BATON_BAD_ROW = 9,
  BATON_NOT_LOADED = 10,
  BATON_BAD_CPU = 11
};

enum { BATON_F32 = 0, BATON_BF16 = 1 };

/* How matrices are held (common/model/quantization.py). INT4: the output head, which may be the embedding, in INT8. */
enum { BATON_PLAIN = 0, BATON_INT8 = 1, BATON_INT4 = 2 };

/* Weights, by role. Matrices come row-major [out_features, in_features] in the model's dtype; vectors likewise. */
enum {
  BATON_EMBED = 0,
  BATON_LM_HEAD = 1,
  BATON_FINAL_NORM = 2,
  BATON_INPUT_NORM = 3,
  BATON_Q = 4,
  BATON_K = 5,
  BATON_V = 6,
  BATON_O = 7,
  BATON_POST_NORM = 8,
  BATON_GATE = 9,
  BATON_UP = 10,
  BATON_DOWN = 11,
  BATON_Q_BIAS = 12,
  BATON_K_BIAS = 13,
  BATON_V_BIAS = 14,
  BATON_O_BIAS = 15,
  BATON_GATE_BIAS = 16,
  BATON_UP_BIAS = 17,
  BATON_DOWN_BIAS = 18
};

typedef struct {
  int32_t dtype, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t quantization;    /* BATON_PLAIN, or what load_codes brings for each matrix but an embedding of its own */
  int32_t tied_embeddings; /* 1: no LM_HEAD is loaded, the embedding serves both ends */
  int32_t num_threads;     /* the caller's thread included */
  int32_t spin_us;         /* how long a thread without work spins before it sleeps */
  const int32_t* cpus;     /* [num_threads - 1], where each helper thread is pinned; null: nowhere */
  float rms_norm_eps;
  const float* inv_freq;   /* [head_dim / 2], rope scaling already applied; copied */
} baton_config;

/* One step, as common/engine/batch.py describes it. kv_pool: [num_layers, num_blocks, 2, num_kv_heads, block_size,
 * head_dim] in the model's dtype. logits: [num_logits, vocab_size] f32, written. greedy: [num_logits] indices of the
 * rows' largest logits, the first of equals; -1 where a logit is not finite; may be null. */
typedef struct {
  int32_t num_tokens, num_sequences, table_width, num_logits;
  const int64_t *token_ids, *positions, *slot_mapping;
  const int32_t *query_start, *seq_lens, *block_tables;
  const int64_t* logits_rows;
  void* kv_pool;
  int32_t num_blocks, block_size;
  float* logits;
  int64_t* greedy;
} baton_batch;

typedef struct baton_model baton_model;

int32_t baton_model_create(const baton_config* config, baton_model** out);
void baton_model_destroy(baton_model* model);
int32_t baton_model_load(baton_model* model, int32_t role, int32_t layer, const void* data, int64_t rows, int64_t cols);
/* codes: [rows, groups * 32] bytes, groups = ceil(cols / 32); scales, minima: bfloat16 [rows, groups]. */
int32_t baton_model_load_codes(baton_model* model, int32_t role, int32_t layer, const uint8_t* codes,
                               const uint16_t* scales, const uint16_t* minima, int64_t rows, int64_t cols);
/* One product alone, to check and to time it: out [rows, features] f32 = x [rows, cols] of `dtype` times coded weights
 * [features, cols], as a model quantised so computes it. Allocates; one thread. */
int32_t baton_linear_codes(int32_t dtype, int32_t quantization, const void* x, int64_t rows, int64_t cols,
                           const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, int64_t features,
                           float* out);
int32_t baton_model_forward(baton_model* model, const baton_batch* batch);
int64_t baton_model_weight_bytes(const baton_model* model);
int64_t baton_model_workspace_bytes(const baton_model* model);

/* Copies of KV blocks (block_copy.h). runs: [num_runs] addresses of run_bytes bytes each; packed: all of them, in order.
 * Both return the XXH3-64 of the packed bytes. run_bytes must be a multiple of 64, and all together more than 240. */
uint64_t baton_gather(const uint64_t* runs, int64_t num_runs, int64_t run_bytes, uint8_t* packed);
uint64_t baton_scatter(const uint64_t* runs, int64_t num_runs, int64_t run_bytes, const uint8_t* packed);
