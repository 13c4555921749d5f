"""Logs of every process: structlog to stderr, as console lines or JSON; one pipeline for our and libraries' records.

    structlog logger ── level filter ─┐
                                      ├─ stdlib root handler ── identity, redaction ── console | JSON ── stderr
    uvicorn, grpc, asyncio (stdlib) ──┘

Prompts and generated text never reach a log: a value under a key that could hold them is replaced, and tracebacks
show no local variables.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["console", "json"]
REDACTED: Final = "<not logged>"
# Keys under which a careless call could log what a user wrote or was answered.
PRIVATE_KEYS: Final = frozenset(
    {"prompt", "prompts", "messages", "text", "content", "completion", "body", "token_ids", "api_key", "secret"}
)
# Libraries that speak at INFO of things we log ourselves.
QUIET_LOGGERS: Final = ("uvicorn", "uvicorn.access", "uvicorn.error", "grpc", "asyncio", "httpx")


def configure_logging(
    level: str, log_format: LogFormat, role: str, worker_id: str = "", *, stream: TextIO | None = None
) -> None:
    """Set up this process's logs; a later call replaces the former set-up, for loggers that exist already too.

    level: debug, info, warning or error; libraries stay at warning unless it is debug. role and worker_id are in every
    line. stream: stderr if not given.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(log_format, role, worker_id, colors=handler.stream.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in QUIET_LOGGERS:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    structlog.configure(
        processors=[*_shared_processors(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger named after a module. Events are short constants; what varies goes into keywords."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(name)
    return logger


def redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace whatever stands under a private key."""
    for key in PRIVATE_KEYS & event.keys():
        event[key] = REDACTED
    return event


def _shared_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _formatter(log_format: LogFormat, role: str, worker_id: str, *, colors: bool) -> logging.Formatter:
    identity = {"role": role, **({"worker_id": worker_id} if worker_id else {})}

    def add_identity(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**event, **identity}

    render: list[Processor]
    if log_format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # The default traceback of the console renderer shows locals, and with them prompts.
        render = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared_processors(),
        processors=[add_identity, redact, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
