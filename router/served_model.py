"""What the router reads of a Hugging Face folder: limits, tokenizer, chat template, fingerprint. No weights."""

from __future__ import annotations

import time
from pathlib import Path

from common.config import Settings
from common.errors import StartupError
from common.model.chat_template import ChatTemplate
from common.model.config import load_model_config
from common.model.fingerprint import model_fingerprint
from common.model.tokenizer import Tokenizer
from router.gateway.state import ServedModel


def load_served_model(settings: Settings) -> ServedModel:
    """Reads files for up to seconds: call it in a thread. Raises StartupError, one line naming the file or setting."""
    if not settings.model:
        raise StartupError("no model is named: pass --model with a Hugging Face folder")
    folder = Path(settings.model)
    config = load_model_config(folder)
    tokenizer = Tokenizer(folder)
    template = ChatTemplate(folder)
    if settings.max_model_len > config.max_position_embeddings:
        raise StartupError(
            f"max_model_len is {settings.max_model_len}, but the model's context is {config.max_position_embeddings}: "
            "lower it or leave it out"
        )
    max_model_len = settings.max_model_len or config.max_position_embeddings
    return ServedModel(
        name=settings.served_model_name or folder.name,
        fingerprint=model_fingerprint(folder, settings.quantization),
        created=int(time.time()),
        max_model_len=max_model_len,
        max_prompt_chars=max_model_len * tokenizer.longest_token_chars,
        vocab_size=config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        block_size=settings.block_size,
        encoder=tokenizer,
        render_chat=template.render,
        new_detokenizer=tokenizer.new_detokenizer,
        token_bytes=tokenizer.token_bytes,
    )
