"""A model folder without weights worth the name, made without torch: enough for everything that a router reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2
# 3 special tokens, 256 bytes, and the merges that the corpus gives.
VOCAB_SIZE = 300
MAX_MODEL_LEN = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_folder(folder: Path, **config: object) -> Path:
    """A Llama-shaped config, a byte-level BPE tokenizer, a chat template and an empty safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog in an hour, and then " * 8], trainer)
    return tokenizer
