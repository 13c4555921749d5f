"""Text to tokens and back, over the `tokenizers` library. No torch, no transformers: routers import this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from common.errors import StartupError, invalid
from common.model.config import load_model_config
from common.model.config_keys import read_json_object
from common.model.detokenizer import IncrementalDetokenizer, detokenizer_factory, token_bytes_of


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Immutable and thread-safe.

    Raises StartupError (one line, naming the file) if tokenizer.json is missing, broken, or of a kind whose text can't
    be streamed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        decoder = read_json_object(path).get("decoder")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path} is not a tokenizer that this version can read: {error}") from None
        # Files are often saved with the settings of training batches.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            self._new_detokenizer = detokenizer_factory(self._tokenizer, decoder)
            self._token_bytes = token_bytes_of(self._tokenizer, decoder)
        except ValueError as error:
            raise StartupError(f"{path}: {error}") from None
        self._eos_token_ids = load_model_config(folder).eos_token_ids or self._named_eos(folder)

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included. A model's embedding may have more rows, for padding."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token_chars(self) -> int:
        """Of any token as the vocabulary spells it: n tokens never hold more text than n times this."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """config.json's and generation_config.json's, or, where neither names any, tokenizer_config.json's."""
        return self._eos_token_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. add_special_tokens: as the tokenizer's post-processor does (e.g. BOS); False where a chat template
        wrote them. Lets other threads run meanwhile. Raises BatonError (invalid request) on a lone surrogate."""
        try:
            # The batch call, because unlike `encode` it runs without the interpreter lock.
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise invalid("text must be Unicode without lone surrogates", "prompt") from None
        ids: list[int] = encoded[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens; ids that it doesn't know give none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, perhaps a part of a character; of a special one, its name."""
        return self._token_bytes(token_id)

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """For one stream of output tokens."""
        return self._new_detokenizer()

    def _named_eos(self, folder: Path) -> tuple[int, ...]:
        path = folder / "tokenizer_config.json"
        named = read_json_object(path).get("eos_token") if path.exists() else None
        token = named.get("content") if isinstance(named, dict) else named
        token_id = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        return () if token_id is None else (token_id,)
