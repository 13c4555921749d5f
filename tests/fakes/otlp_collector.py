"""An OTLP/gRPC collector of traces in this process: takes spans, checks nothing, forgets nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Collected:
    """One span as it came over the wire. parent_id "" for a root. error: the status message, None without one."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any] = field(repr=False)


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """headers: of the last export."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self.headers: dict[str, str] = {}
        self._changed = threading.Condition()

    def trace(self, trace_id: str) -> list[Collected]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def names(self, service: str = "") -> list[str]:
        """In order of their start."""
        return [s.name for s in sorted(self.spans, key=lambda s: s.start_ns) if service in ("", s.service)]

    def one(self, name: str, service: str = "") -> Collected:
        found = [s for s in self.spans if s.name == name and service in ("", s.service)]
        assert len(found) == 1, f"{len(found)} spans {name!r} among {self.names(service)}"
        return found[0]

    async def until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        def wait() -> bool:
            with self._changed:
                return bool(self._changed.wait_for(condition, timeout_s))

        assert await asyncio.to_thread(wait), f"waited {timeout_s:g} s; spans are {self.names()}"

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        self.headers = dict(context.invocation_metadata())
        with self._changed:
            for of_resource in request.resource_spans:
                resource = _attributes(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += [_collected(span, resource) for span in of_scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def otlp_collector() -> Iterator[tuple[OtlpCollector, str]]:
    """The collector and its endpoint. Threads, not tasks: tests look for tasks that are left over."""
    collector = OtlpCollector()
    server = grpc.server(ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0),))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def assert_one_tree(spans: list[Collected], root_parent: str = "") -> Collected:
    """One trace, one root, every other span its child, every span closed. Returns the root."""
    assert len({span.trace_id for span in spans}) == 1
    assert len({span.span_id for span in spans}) == len(spans)
    (root,) = [span for span in spans if span.parent_id == root_parent]
    for span in spans:
        assert 0 < span.start_ns <= span.end_ns, span
        if span is not root:
            assert span.parent_id == root.span_id, span
    return root


def _collected(span: trace_pb2.Span, resource: dict[str, Any]) -> Collected:
    return Collected(
        service=resource["service.name"],
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        error=span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else None,
        events=[(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        resource=resource,
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
