"""A random Llama of some 100 k weights, as a Hugging Face folder: quick to make, and transformers loads it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog, and then the other one; " * 4, "in 1234567890 hours; " * 9]


def make_tiny_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Writes config, weights, tokenizer and chat template into `folder`. `overrides` replace keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32" if dtype == torch.float32 else "bfloat16",
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    save_file(tiny_weights(config, seed, dtype), folder / "model.safetensors", {"format": "pt"})
    _make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def tiny_weights(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Wide enough random weights that greedy text varies."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    weights = {"model.embed_tokens.weight": random(config["vocab_size"], hidden), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        weights |= {
            f"model.layers.{layer}.{name}": tensor
            for name, tensor in {
                **family_weights(config, random, generator, dtype),
                "input_layernorm.weight": norm(),
                "self_attn.q_proj.weight": random(q_size, hidden),
                "self_attn.k_proj.weight": random(kv_size, hidden),
                "self_attn.v_proj.weight": random(kv_size, hidden),
                "self_attn.o_proj.weight": random(hidden, q_size),
                "post_attention_layernorm.weight": norm(),
            }.items()
        }
    return weights


def family_weights(config: dict[str, Any], random: Any, generator: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a layer has in one family and not in another: the MLP or its experts, biases, norms of heads."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    sizes = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}

    def vector(size: int, mean: float, spread: float) -> torch.Tensor:
        return (mean + spread * torch.randn(size, generator=generator)).to(dtype)

    match config["architectures"][0]:
        case "MixtralForCausalLM":
            mlp = {"block_sparse_moe.gate.weight": random(config["num_local_experts"], hidden)}
            for expert in (f"block_sparse_moe.experts.{e}" for e in range(config["num_local_experts"])):
                mlp |= {f"{expert}.w1.weight": random(inner, hidden), f"{expert}.w3.weight": random(inner, hidden)}
                mlp[f"{expert}.w2.weight"] = random(hidden, inner)
            return mlp
        case "Qwen2ForCausalLM":
            extra = {f"self_attn.{kind}_proj.bias": vector(n * head_dim, 0.0, 0.5) for kind, n in sizes.items()}
        case "Qwen3ForCausalLM":
            extra = {f"self_attn.{kind}_norm.weight": vector(head_dim, 1.0, 0.2) for kind in "qk"}
        case _:
            extra = {}
    return extra | {
        "mlp.gate_proj.weight": random(inner, hidden),
        "mlp.up_proj.weight": random(inner, hidden),
        "mlp.down_proj.weight": random(hidden, inner),
    }


def _make_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer
