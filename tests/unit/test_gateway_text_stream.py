"""Text shown to a client: whole characters, no stop string nor the beginning of one."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.text_stream import StopHit, TextStream


class ByteDetokenizer:
    """A token is a byte; ids from 256 on are special and give no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids) -> str:
        return self._decoder.decode(bytes(t for t in token_ids if t < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def stream(stop=(), stop_token_ids=()) -> TextStream:
    return TextStream(ByteDetokenizer(), tuple(stop), tuple(stop_token_ids))


def test_a_stop_string_spread_over_chunks_never_leaks():
    text = stream(["DEFGHIJ"])
    shown = [text.push(list(piece)) for piece in (b"abcDE", b"FGHI", b"J", b"tail")[:2]]
    assert shown == ["abc", ""]
    assert text.push(list(b"Jtail")) == StopHit("", 1)


def test_a_held_back_beginning_is_shown_once_it_can_not_become_a_stop_string():
    text = stream(["DEFGHIJ"])
    assert text.push(list(b"DEF")) == ""
    assert text.push(list(b"X")) == "DEFX"
    assert text.push(list(b"DE")) == ""
    assert text.finish() == "DE"


def test_the_token_that_completes_the_stop_string_is_the_last_that_counts():
    assert stream(["lo"]).push(list(b"hello world")) == StopHit("hel", 5)


def test_the_earliest_of_several_stop_strings_cuts():
    assert stream(["cd", "bc"]).push(list(b"abcd")) == StopHit("a", 3)


def test_an_overlapping_restart_of_the_stop_string_is_seen():
    text = stream(["aab"])
    assert text.push(list(b"aa")) == ""
    assert text.push(list(b"a")) == "a"
    assert text.push(list(b"b")) == StopHit("", 1)


def test_characters_are_whole_and_a_stop_token_has_no_text():
    text = stream(stop_token_ids=[65])
    emoji = list("🙂".encode())
    assert [text.push([byte]) for byte in emoji] == ["", "", "", "🙂"]
    assert text.push([66, 65]) == "B"
    assert text.push([65]) == ""
    assert text.push(emoji[:2]) == ""
    assert text.finish() == "\ufffd"


def test_a_stop_string_completed_by_the_last_flush_cuts():
    text = stream(["\ufffd"])
    assert text.push([97, 0xF0]) == "a"
    assert text.finish() == StopHit("", 0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@given(
    text=st.text(alphabet="ab", max_size=24), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
)
def test_however_tokens_are_bundled_the_text_ends_before_the_first_stop_string(chunk, text, stops):
    stream_ = stream(stops)
    tokens = list(text.encode())
    shown, count, hit = "", 0, False
    for start in range(0, len(tokens), chunk):
        piece = stream_.push(tokens[start : start + chunk])
        if isinstance(piece, StopHit):
            shown, count, hit = shown + piece.text, count + piece.num_tokens, True
            break
        shown, count = shown + piece, count + len(tokens[start : start + chunk])
        assert not any(stop in shown for stop in stops)
    if not hit:
        shown += stream_.finish()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert hit == bool(ends)
    if ends:
        first_end = min(ends)
        assert count == first_end
        assert shown == text[: min(text[:first_end].index(s) for s in stops if s in text[:first_end])]
    else:
        assert shown == text
