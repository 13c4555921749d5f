"""Logs: one pipeline, both formats, identity in every line, no prompt in any."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from common.telemetry import REDACTED, configure_logging, get_logger
from tests.logging_state import logging_restored

PROMPT = "my most private thoughts"


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    with logging_restored():
        yield


def json_lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_own_and_library_records_come_out_alike():
    out = io.StringIO()
    configure_logging("info", "json", "decode", "decode-0", stream=out)
    get_logger("baton.x").info("loaded", seconds=1.5)
    logging.getLogger("uvicorn.error").warning("slow %s", "client")
    own, foreign = json_lines(out)
    assert (own["event"], own["seconds"], own["logger"], own["level"]) == ("loaded", 1.5, "baton.x", "info")
    assert (foreign["event"], foreign["logger"], foreign["level"]) == ("slow client", "uvicorn.error", "warning")
    for line in (own, foreign):
        assert (line["role"], line["worker_id"]) == ("decode", "decode-0")
        assert line["timestamp"].endswith("Z")


def test_below_the_level_nothing_is_written_and_libraries_are_quiet():
    out = io.StringIO()
    configure_logging("info", "json", "router", stream=out)
    get_logger("x").debug("no")
    logging.getLogger("uvicorn.access").info("no")
    assert out.getvalue() == ""
    configure_logging("debug", "json", "router", stream=out)
    get_logger("x").debug("yes")
    logging.getLogger("uvicorn.access").info("yes")
    assert [line["event"] for line in json_lines(out)] == ["yes", "yes"]


def test_a_logger_made_before_the_set_up_follows_it():
    log = get_logger("early")
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "json", "prefill", stream=first)
    log.info("one")
    configure_logging("info", "json", "prefill", "prefill-1", stream=second)
    log.info("two")
    assert [line["event"] for line in json_lines(first)] == ["one"]
    assert json_lines(second)[0]["worker_id"] == "prefill-1"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_no_prompt_reaches_a_log(log_format):
    out = io.StringIO()
    configure_logging("debug", log_format, "router", stream=out)
    log = get_logger("x")
    log.info("request", prompt=PROMPT, messages=[{"content": PROMPT}], token_ids=[1, 2, 3])

    def fails(prompt: str) -> None:
        raise ValueError("cut off")

    try:
        fails(PROMPT)
    except ValueError:
        log.exception("request failed")
        logging.getLogger("grpc").exception("callback failed")
    text = out.getvalue()
    assert PROMPT not in text
    assert REDACTED in text
    assert text.count("ValueError: cut off") == 2
