"""OpenTelemetry collector on a real socket that keeps what it receives, over HTTP or gRPC."""

import gzip
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Span:
    """Exported span, with ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    service: str
    state: str
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    failed: bool
    start_ns: int
    end_ns: int

    @property
    def error(self) -> str | None:
        return self.attributes.get("error.type")

    @property
    def id(self) -> str:
        """Return the trace id and span id in the format of `traceparent`."""
        return f"{self.trace_id}-{self.span_id}"


@dataclass
class Collector:
    """Exports that the collector has received.

    Attributes:
        url: value for `--otlp-traces-endpoint`.
        bodies: request bodies as received.
        spans: spans in those bodies.
        headers: headers of the latest export.
    """

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_service in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = attributes(of_service.resource.attributes)["service.name"]
            for scope in of_service.scope_spans:
                self.spans += [decoded(span, service) for span in scope.spans]

    @property
    def roots(self) -> list[Span]:
        """Return the root spans, one for each client request, in order of arrival."""
        roots = [span for span in self.spans if span.kind == "SERVER"]
        return sorted(roots, key=lambda span: span.start_ns)

    def children(self, parent: Span) -> list[Span]:
        """Return the child spans of a span, ordered by start time."""
        of = [
            span
            for span in self.spans
            if (span.trace_id, span.parent_id) == (parent.trace_id, parent.span_id)
        ]
        return sorted(of, key=lambda span: span.start_ns)


def value(said: AnyValue) -> Any:
    which = said.WhichOneof("value")
    if which == "array_value":
        return [value(one) for one in said.array_value.values]
    return getattr(said, which) if which else None


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def decoded(span: WireSpan, service: str) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        service=service,
        state=span.trace_state,
        attributes=attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


@contextmanager
def over_http() -> Iterator[Collector]:
    """Run a collector that receives OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers = {name.lower(): said for name, said in self.headers.items()}
            packed = self.headers.get("Content-Encoding") == "gzip"
            collector.take(gzip.decompress(body) if packed else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Suppress the access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def over_grpc() -> Iterator[Collector]:
    """Run a collector that receives OTLP over gRPC."""
    collector = Collector()

    def export(body: bytes, _: Any) -> bytes:
        collector.take(body)
        said: bytes = ExportTraceServiceResponse().SerializeToString()
        return said

    methods = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        collector.url = f"http://127.0.0.1:{port}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(grace=None).wait()
