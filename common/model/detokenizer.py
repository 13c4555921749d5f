"""A stream of tokens into a stream of whole characters. Each token is looked at once, whatever the text's length.

Which of two ways depends on how the tokenizer's decoder makes text of tokens:

    byte-level BPE   a token stands for fixed bytes: a table lookup, and an incremental UTF-8 decoder
    SentencePiece    a token is a piece of text, or, where the vocabulary lacks a character, one byte of it. A run of
                     byte tokens is text or nonsense as a whole, so it's held back until it ends; then a short window
                     is decoded with and without the new tokens, and the difference is the new text
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import tokenizers

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_SENTENCEPIECE_DECODERS: Final = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class IncrementalDetokenizer(Protocol):
    """One stream's state. Special tokens give no text.

    However a stream's tokens are split into pushes: the texts of all pushes and of the flush add up to what
    Tokenizer.decode makes of all tokens. After flush, the object is spent.
    """

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; an incomplete one is held back."""
        ...

    def flush(self) -> str:
        """What is still held back; bytes that never became a character are U+FFFD."""
        ...


class DetokenizerFactory(Protocol):
    """What the streams of one tokenizer share. Raises nothing; thread-safe."""

    def __call__(self) -> IncrementalDetokenizer: ...


def detokenizer_factory(tokenizer: tokenizers.Tokenizer, decoder: Any) -> DetokenizerFactory:
    """decoder: the "decoder" value of tokenizer.json. Raises ValueError, naming its type, if it is of neither kind."""
    kinds = _decoder_types(decoder)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocab = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    if kinds == ["ByteLevel"]:
        table = [b"" if i in special or i not in vocab else _token_bytes(vocab[i]) for i in range(max(vocab) + 1)]
        return lambda: _ByteLevelDetokenizer(table)
    if kinds and _SENTENCEPIECE_DECODERS.issuperset(kinds):
        byte_tokens = frozenset(i for i, token in vocab.items() if _BYTE_TOKEN.fullmatch(token))
        visible = frozenset(vocab.keys() - special)
        return lambda: _WindowDetokenizer(tokenizer, visible, byte_tokens)
    raise ValueError(f"decoder {' + '.join(kinds) or None!r} is neither byte-level BPE nor SentencePiece")


def token_bytes_of(tokenizer: tokenizers.Tokenizer, decoder: Any) -> Callable[[int], bytes]:
    """A function from a token's id to its bytes, special ones by name; ids that nobody knows have none. decoder: as
    above."""
    byte_level = _decoder_types(decoder) == ["ByteLevel"]
    added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}

    def token_bytes(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        token = tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if byte_level:
            return _token_bytes(token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return token_bytes


class _ByteLevelDetokenizer:
    __slots__ = ("_decoder", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        table, size = self._table, len(self._table)
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < size]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """context: tokens whose text was given last, so that a decoder's rule for the start of a text can't strike."""

    __slots__ = ("_byte_tokens", "_context", "_pending", "_tokenizer", "_visible")

    def __init__(self, tokenizer: tokenizers.Tokenizer, visible: frozenset[int], byte_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._visible = visible
        self._byte_tokens = byte_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        self._pending += [i for i in token_ids if i in self._visible]
        pending = self._pending
        if not pending or pending[-1] in self._byte_tokens:
            return ""
        return self._emit()

    def flush(self) -> str:
        return self._emit() if self._pending else ""

    def _emit(self) -> str:
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._pending)
        self._context, self._pending = self._pending, []
        return after[len(before) :]


def _decoder_types(decoder: Any) -> list[str]:
    """Names of the decoder's steps, in order."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder.get("decoders", []) for kind in _decoder_types(step)]
    return [str(decoder.get("type"))]


def _token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token (an added one) with any other character is plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed: printable Latin-1 stands for itself, the other 68 bytes, in
    order, for U+0100 and on (github.com/openai/gpt-2, src/encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_of_character()
