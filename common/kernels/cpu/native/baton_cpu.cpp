// The C ABI (api.h) over ModelOf<T> and the block copies.
#include <new>

#include "block_copy.h"
#include "forward.h"
#include "linear_codes.h"

struct baton_model {
  baton::Model* impl;
};

template <class T>
static int32_t make(const baton_config& c, baton_model** out) {
  auto* impl = new (std::nothrow) baton::ModelOf<T>(c);
  if (!impl) return BATON_NO_MEMORY;
  const int rc = impl->init(c);
  if (rc != BATON_OK) {
    delete impl;
    return rc;
  }
  *out = new baton_model{impl};
  return BATON_OK;
}

extern "C" {

int32_t baton_model_create(const baton_config* c, baton_model** out) {
  *out = nullptr;
  const bool sizes = c->num_layers > 0 && c->hidden_size > 0 && c->intermediate_size > 0 && c->num_heads > 0 &&
                     c->num_kv_heads > 0 && c->vocab_size > 0 && c->num_threads > 0;
  if (!sizes || c->num_threads > baton::MAX_THREADS || c->head_dim < 2 || c->head_dim % 2 != 0 ||
      c->num_heads % c->num_kv_heads != 0 || c->quantization < BATON_PLAIN || c->quantization > BATON_INT4)
    return BATON_BAD_CONFIG;
  return c->dtype == BATON_BF16 ? make<baton::BF16>(*c, out)
         : c->dtype == BATON_F32 ? make<baton::F32>(*c, out)
                                 : (int32_t)BATON_BAD_CONFIG;
}

void baton_model_destroy(baton_model* m) {
  if (!m) return;
  delete m->impl;
  delete m;
}

int32_t baton_model_load(baton_model* m, int32_t role, int32_t layer, const void* data, int64_t rows, int64_t cols) {
  return m->impl->load(role, layer, data, rows, cols);
}

int32_t baton_model_load_codes(baton_model* m, int32_t role, int32_t layer, const uint8_t* codes,
                               const uint16_t* scales, const uint16_t* minima, int64_t rows, int64_t cols) {
  return m->impl->load_codes(role, layer, codes, scales, minima, rows, cols);
}

int32_t baton_linear_codes(int32_t dtype, int32_t quantization, const void* x, int64_t rows, int64_t cols,
                           const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, int64_t features,
                           float* out) {
  if (quantization != BATON_INT8 && quantization != BATON_INT4) return BATON_BAD_CONFIG;
  if (rows < 1 || cols < 1 || features < 1) return BATON_BAD_SHAPE;
  const baton::Format f = quantization == BATON_INT8 ? baton::Format::INT8 : baton::Format::INT4;
  const baton::CodedLinear linear{f, (int)rows, (int)cols, (int)features, codes, scales, minima};
  if (dtype == BATON_BF16) return linear.run<baton::BF16>((const uint16_t*)x, out);
  return dtype == BATON_F32 ? linear.run<baton::F32>((const float*)x, out) : (int32_t)BATON_BAD_CONFIG;
}

int32_t baton_model_forward(baton_model* m, const baton_batch* batch) { return m->impl->forward(*batch); }

int64_t baton_model_weight_bytes(const baton_model* m) { return m->impl->weight_bytes(); }

int64_t baton_model_workspace_bytes(const baton_model* m) { return m->impl->workspace_bytes(); }

uint64_t baton_gather(const uint64_t* runs, int64_t num_runs, int64_t run_bytes, uint8_t* packed) {
  return baton::gather_runs(runs, num_runs, run_bytes, packed);
}

uint64_t baton_scatter(const uint64_t* runs, int64_t num_runs, int64_t run_bytes, const uint8_t* packed) {
  return baton::scatter_runs(packed, runs, num_runs, run_bytes);
}

}  // extern "C"
