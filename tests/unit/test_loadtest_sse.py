"""However the bytes of an event stream are cut, the events are the same."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.sse import MAX_EVENT_BYTES, SseSplitter

text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
line_end = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw):
    """(bytes, data of its events): events of one or more data lines, with comments and fields in between."""
    parts, expected = [], []
    for _ in range(draw(st.integers(0, 5))):
        lines, data = [], []
        for kind in draw(st.lists(st.sampled_from(["data", "data", "comment", "id", "bare"]), min_size=1, max_size=4)):
            value = draw(text)
            if kind == "data":
                lines.append(f"data: {value}")
                data.append(value)
            elif kind == "bare" and not value.startswith(" "):
                lines.append(f"data:{value}")
                data.append(value)
            elif kind == "comment":
                lines.append(f": {value}")
            else:
                lines.append(f"id: {value}")
        end = draw(line_end)
        parts.append(end.join(lines) + end + end)
        if data:
            expected.append("\n".join(data).encode())
    return "".join(parts).encode(), expected


def split_at(data, cuts):
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(streams(), st.data())
def test_any_split_of_the_bytes_gives_the_same_events(stream, data):
    body, expected = stream
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    splitter = SseSplitter()
    assert [event for piece in split_at(body, cuts) for event in splitter.feed(piece)] == expected


@given(streams())
def test_byte_by_byte_gives_the_same_events(stream):
    body, expected = stream
    splitter = SseSplitter()
    assert [e for i in range(len(body)) for e in splitter.feed(body[i : i + 1])] == expected


def test_an_event_that_was_cut_off_is_not_given():
    splitter = SseSplitter()
    assert splitter.feed(b"data: one\n\ndata: tw") == [b"one"]
    assert splitter.feed(b"o\n") == []


def test_an_endless_event_is_an_error_rather_than_a_leak():
    splitter = SseSplitter()
    splitter.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 6))
    with pytest.raises(ValueError, match="longer"):
        splitter.feed(b"x")
