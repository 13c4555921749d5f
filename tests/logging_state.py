"""Logging as it was: for tests that configure it, whose captured stderr is closed when the next test logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from common.telemetry import QUIET_LOGGERS


@contextmanager
def logging_restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, *QUIET_LOGGERS)]
    states = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, states, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate
        structlog.reset_defaults()
