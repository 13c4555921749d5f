"""A whole Llama forward pass in one native call: the CPU's fast path behind common/model/interface.Model.

Weights are packed once, tensor by tensor, into the executor's own memory; no second copy is kept. See native/ for the
kernels, docs/decisions/0010-native-cpu-kernels.md for what was measured and chosen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from common.engine.batch import Batch
from common.kernels.cpu.build import NativeUnavailableError
from common.kernels.cpu.library import check, ffi, load_library
from common.kernels.quantization import Bits, quantize
from common.kvcache.kv_cache import KvCache
from common.model.config import ModelConfig
from common.model.quantization import Quantization, quantization_of
from common.model.rope import inverse_frequencies

SPIN_US: Final = 50
_LAYER_ROLES: Final[dict[str, str]] = {
    "input_layernorm.weight": "BATON_INPUT_NORM",
    "self_attn.q_proj.weight": "BATON_Q",
    "self_attn.k_proj.weight": "BATON_K",
    "self_attn.v_proj.weight": "BATON_V",
    "self_attn.o_proj.weight": "BATON_O",
    "post_attention_layernorm.weight": "BATON_POST_NORM",
    "mlp.gate_proj.weight": "BATON_GATE",
    "mlp.up_proj.weight": "BATON_UP",
    "mlp.down_proj.weight": "BATON_DOWN",
}
_MODEL_ROLES: Final[dict[str, str]] = {
    "model.embed_tokens.weight": "BATON_EMBED",
    "model.norm.weight": "BATON_FINAL_NORM",
    "lm_head.weight": "BATON_LM_HEAD",
}
_DTYPES: Final[dict[torch.dtype, str]] = {torch.float32: "BATON_F32", torch.bfloat16: "BATON_BF16"}
_QUANTIZATIONS: Final[dict[str, str]] = {"none": "BATON_PLAIN", "int8": "BATON_INT8", "int4": "BATON_INT4"}
_LAYER_PREFIX: Final = "model.layers."
_BATCH_FIELDS: Final = (
    ("token_ids", "int64_t *"),
    ("positions", "int64_t *"),
    ("slot_mapping", "int64_t *"),
    ("query_start", "int32_t *"),
    ("seq_lens", "int32_t *"),
    ("block_tables", "int32_t *"),
    ("logits_rows", "int64_t *"),
)
_C_TYPES: Final = {"int32_t *": torch.int32, "int64_t *": torch.int64, "float *": torch.float32}


class NativeModel:
    """Implements common/model/interface.Model. Owns the packed weights and `num_threads - 1` threads, which sleep
    between steps; the thread that calls forward is the last one. Both end with the object.

    A logits row's bits depend on its own sequence alone: not on the batch, the chunking, the thread count, or on
    whether prefill or decode computed its context.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        num_threads: int,
        *,
        cpus: Sequence[int] | None = None,
        library: Any = None,
        spin_us: int = SPIN_US,
        quantization: Quantization = "none",
    ) -> None:
        """tensors: (name as in the checkpoint, value), each once, in any order; read one at a time.
        cpus: one for each helper thread, to pin it there (the caller's thread is the caller's to pin).
        library: from load_library (default: the best for this CPU). spin_us: how long a thread that waits for another
        spins before it sleeps. quantization: of the matrices, as they are loaded; in bfloat16 activations are then
        multiplied as int8, in float32 as they are (common/kernels/quantization.py).
        Raises NativeUnavailableError; ValueError for a wrong or missing tensor; MemoryError.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"no native executor for {dtype}")
        if config.qkv_bias or config.qk_norm or config.num_experts:
            raise NativeUnavailableError(f"the native executor does not compute a {config.architecture}")
        self._lib = load_library() if library is None else library
        self._config = config
        self._dtype = dtype
        self._quantization = quantization
        self._handle = self._create(num_threads, cpus, spin_us)
        self._finalizer = weakref.finalize(self, self._lib.baton_model_destroy, self._handle)
        self._finalizer.atexit = False  # a step may still be running in another thread; the process frees it all
        for name, tensor in tensors:
            self._load(name, tensor)
        self._logits = torch.empty(0)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def memory_bytes(self) -> int:
        """Of packed weights and the workspace as grown so far."""
        return int(
            self._lib.baton_model_weight_bytes(self._handle) + self._lib.baton_model_workspace_bytes(self._handle)
        )

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """See Model.forward. The tensor is overwritten by the next call. Raises ValueError, before anything is
        written, for a batch that would reach outside the vocabulary or the cache."""
        logits, _ = self._forward(batch, kv_cache, greedy=False)
        return logits

    def forward_greedy(self, batch: Batch, kv_cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """See GreedyModel.forward_greedy."""
        return self._forward(batch, kv_cache, greedy=True)

    def _forward(self, batch: Batch, kv_cache: KvCache, *, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows = batch.logits_rows.numel()
        logits = self._logits
        if logits.shape[0] < rows:
            logits = self._logits = torch.empty(rows, self._config.vocab_size)
        best = torch.empty(rows if greedy else 0, dtype=torch.int64)
        self._check_cache(kv_cache)
        call: Any = ffi.new("baton_batch *")
        # The call goes through bare pointers, and beside it another thread's may put larger logits into their place.
        held = []
        for name, kind in _BATCH_FIELDS:
            tensor = getattr(batch, name).contiguous()
            held.append(tensor)
            setattr(call, name, _pointer(tensor, kind))
        call.num_tokens = batch.token_ids.numel()
        call.num_sequences = batch.num_sequences
        call.table_width = batch.block_tables.shape[1]
        call.num_logits = rows
        call.kv_pool = _pointer(kv_cache.data, "void *")
        call.num_blocks = kv_cache.num_blocks
        call.block_size = kv_cache.layout.block_size
        call.logits = _pointer(logits, "float *")
        call.greedy = _pointer(best, "int64_t *") if greedy else ffi.NULL
        check(self._lib, self._lib.baton_model_forward(self._handle, call), "forward")
        return logits[:rows], best

    def _create(self, num_threads: int, cpus: Sequence[int] | None, spin_us: int) -> Any:
        if cpus is not None and len(cpus) != num_threads - 1:
            raise ValueError(f"{len(cpus)} CPUs for {num_threads - 1} helper threads")
        config, lib = self._config, self._lib
        inv_freq = inverse_frequencies(config).contiguous()
        pinned = ffi.new("int32_t[]", list(cpus or ()))
        c = ffi.new(
            "baton_config *",
            {
                "dtype": getattr(lib, _DTYPES[self._dtype]),
                "num_layers": config.num_layers,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_heads": config.num_heads,
                "num_kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "vocab_size": config.vocab_size,
                "quantization": getattr(lib, _QUANTIZATIONS[self._quantization]),
                "tied_embeddings": int(config.tie_word_embeddings),
                "num_threads": num_threads,
                "spin_us": spin_us,
                "cpus": ffi.NULL if cpus is None else pinned,
                "rms_norm_eps": config.rms_norm_eps,
                "inv_freq": _pointer(inv_freq, "float *"),
            },
        )
        out = ffi.new("baton_model **")
        check(lib, lib.baton_model_create(c, out), "native executor")
        return out[0]

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        role, layer = _MODEL_ROLES.get(name), 0
        if name.startswith(_LAYER_PREFIX):
            index, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
            role, layer = _LAYER_ROLES.get(rest), int(index)
        if role is None or (role == "BATON_LM_HEAD" and self._config.tie_word_embeddings):
            return
        held = quantization_of(name, self._config, self._quantization)
        if held != "none":
            self._load_codes(name, getattr(self._lib, role), layer, tensor, 8 if held == "int8" else 4)
            return
        data = tensor.to(self._dtype).contiguous()
        rows, columns = data.shape if data.dim() == 2 else (data.numel(), 1)
        code = self._lib.baton_model_load(
            self._handle, getattr(self._lib, role), layer, _pointer(data, "void *"), rows, columns
        )
        check(self._lib, code, name)

    def _load_codes(self, name: str, role: int, layer: int, tensor: torch.Tensor, bits: Bits) -> None:
        coded = quantize(tensor, bits)
        code = self._lib.baton_model_load_codes(
            self._handle,
            role,
            layer,
            _pointer(coded.codes, "uint8_t *"),
            _pointer(coded.scales, "uint16_t *"),
            _pointer(coded.minima, "uint16_t *"),
            *tensor.shape,
        )
        check(self._lib, code, name)

    def _check_cache(self, kv_cache: KvCache) -> None:
        config, data = self._config, kv_cache.data
        wanted = (config.num_layers, kv_cache.num_blocks, 2, config.num_kv_heads, data.shape[4], config.head_dim)
        if tuple(data.shape) != wanted or data.dtype != self._dtype or not data.is_contiguous():
            raise ValueError(f"KV cache {tuple(data.shape)} of {data.dtype}: the model needs {wanted} of {self._dtype}")


def _pointer(tensor: torch.Tensor, kind: str) -> Any:
    """The tensor's memory as `kind`; the caller keeps the tensor alive. Raises ValueError for another dtype."""
    if _C_TYPES.get(kind, tensor.dtype) != tensor.dtype:
        raise ValueError(f"a tensor of {tensor.dtype} where {kind} is needed")
    return ffi.cast(kind, tensor.data_ptr())
