"""Text in, text out: streamed text adds up to decoding everything at once, in whole characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from common.errors import BatonError, StartupError
from common.model.detokenizer import detokenizer_factory
from common.model.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("ab z\n\té日本語😀👩‍👧ก็\u0301\ufffd"), max_size=30)
SENTENCEPIECE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Tokenizer:
    return Tokenizer(tiny_model_folder)


@pytest.fixture(scope="module")
def byte_level(tiny_model_folder: Path) -> tokenizers.Tokenizer:
    """With added tokens that are not special: one of byte-level characters, one of others."""
    inner = tokenizers.Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    inner.add_tokens([AddedToken("<tool>"), AddedToken("日 本")])
    return inner


@pytest.fixture(scope="module")
def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's: pieces with ▁ for a space, and a token for each byte."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁", "é", "日", "▁the", "�"]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def cut(draw: st.DataObject, token_ids: list[int]) -> list[list[int]]:
    """Any split into pushes, empty ones included."""
    ends = sorted(draw.draw(st.lists(st.integers(0, len(token_ids)), max_size=10)))
    return [token_ids[a:b] for a, b in zip([0, *ends], [*ends, len(token_ids)], strict=True)]


def stream(factory: Callable[[], object], pushes: list[list[int]]) -> list[str]:
    detokenizer = factory()
    return [*(detokenizer.push(part) for part in pushes), detokenizer.flush()]  # type: ignore[attr-defined]


@settings(max_examples=200)
@given(st.data())
def test_byte_level_streams_add_up(byte_level: tokenizers.Tokenizer, data: st.DataObject) -> None:
    """Any tokens at all: invalid UTF-8, special tokens, ids beyond the vocabulary."""
    token_ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() + 3), max_size=40))
    factory = detokenizer_factory(byte_level, {"type": "ByteLevel"})
    assert "".join(stream(factory, cut(data, token_ids))) == byte_level.decode(token_ids)


@settings(max_examples=300)
@given(st.data())
def test_sentencepiece_streams_add_up(sentencepiece: tokenizers.Tokenizer, data: st.DataObject) -> None:
    size = sentencepiece.get_vocab_size()
    token = st.one_of(st.integers(0, size + 3), st.integers(size - 9, size - 1), st.sampled_from([0xE6 + 2, 0x97 + 2]))
    token_ids = data.draw(st.lists(token, max_size=25))
    factory = detokenizer_factory(sentencepiece, SENTENCEPIECE_DECODER)
    assert "".join(stream(factory, cut(data, token_ids))) == sentencepiece.decode(token_ids)


@settings(max_examples=200)
@given(TEXTS, st.data())
def test_text_streams_in_whole_characters(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    """Each push gives a prefix's continuation, and U+FFFD only where the text itself has it."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer.new_detokenizer, cut(data, token_ids))
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


@settings(max_examples=50)
@given(TEXTS)
def test_sentencepiece_text_streams_token_by_token(sentencepiece: tokenizers.Tokenizer, text: str) -> None:
    token_ids = [i for character in text for i in _pieces(sentencepiece, character)]
    parts = stream(detokenizer_factory(sentencepiece, SENTENCEPIECE_DECODER), [[i] for i in token_ids])
    assert "".join(parts) == text.removeprefix(" ")
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def _pieces(sentencepiece: tokenizers.Tokenizer, character: str) -> list[int]:
    piece = sentencepiece.token_to_id("▁" if character == " " else character)
    return [piece] if piece is not None else [2 + byte for byte in character.encode()]


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x😀y", add_special_tokens=False)
    assert len(token_ids) == 6
    assert stream(tokenizer.new_detokenizer, [[i] for i in token_ids]) == ["x", "", "", "", "😀", "y", ""]


def test_a_stream_that_ends_inside_a_character_says_so_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x😀", add_special_tokens=False)[:-1]
    assert stream(tokenizer.new_detokenizer, [token_ids]) == ["x", "\ufffd"]


def test_streams_of_one_tokenizer_are_apart(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.new_detokenizer(), tokenizer.new_detokenizer()
    ids = tokenizer.encode("😀", add_special_tokens=False)
    first.push(ids[:2])
    assert second.push(ids) == "😀"
    assert first.push(ids[2:]) == "😀"


@given(st.text(max_size=40))
def test_decoding_undoes_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_a_lone_surrogate_is_the_users_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(BatonError, match="surrogate"):
        tokenizer.encode("a\ud800b", add_special_tokens=False)


def test_special_tokens_are_added_only_when_asked_for(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_model_folder, tmp_path)
    value = json.loads((folder / "tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bos = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    value["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": bos}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a", add_special_tokens=True) == [1, *tokenizer.encode("a", add_special_tokens=False)]


def test_saved_truncation_and_padding_are_off(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_model_folder, tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer(folder).encode("zzzzzzzz", add_special_tokens=False)) == 8


def test_eos_ids_are_the_configs_or_else_the_named_token(tiny_model_folder: Path, tmp_path: Path) -> None:
    assert Tokenizer(tiny_model_folder).eos_token_ids == (2, 0)
    folder = copy_folder(tiny_model_folder, tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert Tokenizer(folder).eos_token_ids == (2,)


def test_vocab_size_counts_added_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "tokenizer.json"), ("{}", "tokenizer.json"), ('{"decoder": {"type": "WordPiece"}}', "tokenizer.json")],
)
def test_a_missing_or_broken_file_is_one_line(
    tiny_model_folder: Path, tmp_path: Path, content: str | None, named: str
) -> None:
    folder = copy_folder(tiny_model_folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=named) as caught:
        Tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": []}])
def test_a_decoder_that_cannot_be_streamed_is_refused(byte_level: tokenizers.Tokenizer, decoder: object) -> None:
    with pytest.raises(ValueError, match="neither"):
        detokenizer_factory(byte_level, decoder)


def copy_folder(source: Path, target: Path) -> Path:
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_no_token_holds_more_text_than_the_longest(tokenizer: Tokenizer) -> None:
    longest = tokenizer.longest_token_chars
    for text in ("a" * 500, " " * 500, "\n" * 500, "the quick brown fox " * 20, "日本語" * 50, "#" * 500):
        assert len(text) <= longest * len(tokenizer.encode(text, False))
