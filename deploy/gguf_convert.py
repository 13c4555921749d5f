"""Turns a Llama-architecture GGUF file into a Hugging Face folder, without torch and without a whole copy in memory.

GGUF keeps the weights (here quantised), the vocabulary, the merges and the chat template in one file:

    blk.3.attn_q.weight  Q4_1  ──dequantise──►  float32  ──undo row order──►  bfloat16  ──►  model.safetensors
    tokenizer.ggml.*     ──►  tokenizer.json, tokenizer_config.json           llama.*   ──►  config.json

Formats: GGUF (ggml/docs/gguf.md), safetensors (8-byte little-endian header length, JSON header, raw data).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import StartupError

Progress = Callable[[str], None]

_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN: Final = 3  # gguf.TokenType.CONTROL
_PRE_TOKENIZER: Final = "smollm"


class _Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise StartupError(f"{self._path} has no key {key!r}: not a GGUF file that Baton can convert")
        return field.contents()


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json and
    tokenizer_config.json into the existing `folder`. Raises StartupError if the file isn't a Llama with the 'smollm'
    pre-tokenizer, or names a tensor unknown here."""
    reader = GGUFReader(path)
    metadata = _Metadata(reader, path)
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.pre"] != _PRE_TOKENIZER:
        raise StartupError(
            f"{path} is not a SmolLM2 GGUF: only those are converted; give a Hugging Face folder instead"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _config(metadata, tied))
    eos = metadata["tokenizer.ggml.eos_token_id"]
    bos = metadata["tokenizer.ggml.bos_token_id"]
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos},
    )
    _write_tokenizer(metadata, folder)
    progress("converting the weights to bfloat16 safetensors")
    _write_safetensors(reader, metadata, folder / "model.safetensors")


def _config(metadata: _Metadata, tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        # GGUF keeps it as a float32: 9.999999747e-06 is 1e-05.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _write_tokenizer(metadata: _Metadata, folder: Path) -> None:
    """Byte-level BPE; the pre-tokenizer 'smollm' parts every digit, then splits as GPT-2 does."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[metadata["tokenizer.ggml.eos_token_id"]]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "eos_token": eos,
            "model_max_length": metadata["llama.context_length"],
            "pad_token": eos,
            # The generic class: transformers' GPT2Tokenizer would rebuild the pre-tokenizer without the digit split.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        },
    )


def _write_safetensors(reader: GGUFReader, metadata: _Metadata, path: Path) -> None:
    """Tensor by tensor, so memory stays near one tensor's float32 size."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        begin, end = end, end + 2 * int(np.prod(shape))
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in reader.tensors:
            file.write(_bfloat16(_rows_in_hf_order(tensor, heads)).tobytes())


def _rows_in_hf_order(tensor: ReaderTensor, heads: dict[str, int]) -> npt.NDArray[np.float32]:
    """float32 weights. llama.cpp interleaves the two rotary halves of q's and k's rows; Hugging Face splits them:

    llama.cpp, one head: 0 h 1 h+1 2 h+2 …        Hugging Face: 0 1 2 … h-1 | h h+1 … 2h-1        (h = head_dim / 2)
    """
    weight: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    if kind not in heads:
        return weight
    return weight.reshape(heads[kind], -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the float32 bits, rounded to nearest even. Weights are finite: no NaN to keep."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise StartupError(f"GGUF tensor {name!r} has no place in a Llama model: can't convert this file")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
