"""Spans that a collector receives for a request, and trace headers that instances receive."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from epd.server.api_routes import PIPELINE
from epd.server.operator_routes import METRICS
from tests.collector import Collector, Span, over_grpc, over_http
from tests.requests import image, request, text
from tests.support.backed import Backed, caching
from tests.support.fake_instance import (
    FakeInstance,
    after,
    chunk,
    decodes,
    drops,
    encodes,
    fails_first,
    hangs,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.programs import INSTANCES, called, serving

PICTURE = request(image(b"a secret picture"), text("a secret question"))
CHAT = "POST /v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CLIENTS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "rojo=1,congo=2"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with over_http() as collector:
        yield collector


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def only(collector: Collector) -> Span:
    [root] = collector.roots
    return root


def waiters(fleet: Fleet) -> int:
    """Return how many requests wait for the only encode in progress."""
    [flight] = fleet.runner.app[PIPELINE]._encoder._flights._flights.values()  # noqa: SLF001
    return flight.waiters


def asked_by(instance: FakeInstance, number: int = -1) -> str:
    """Return the parent span in the instance's request; it must be sampled."""
    version, trace, span, flags = instance.calls[number].headers["traceparent"].split("-")
    assert (version, int(flags, 16) & 1) == ("00", 1)
    return f"{trace}-{span}"


async def test_a_request_is_a_span_with_a_child_for_each_stage(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        status, _ = await fleet.chat(PICTURE)

    assert status == 200
    root = only(collector)
    encode, decode = collector.children(root)
    assert (root.name, root.kind, root.service) == (CHAT, "SERVER", "epd-proxy")
    assert root.parent_id == ""
    assert not root.failed
    assert [(span.name, span.kind) for span in (encode, decode)] == [
        ("encode", "CLIENT"),
        ("decode", "CLIENT"),
    ]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "epd.request.id": fleet.d.calls[0].headers["X-Request-Id"],
        "epd.retries": 0,
        "epd.policy": "encode_pd",
        "epd.items.encoded": 1,
    }
    assert encode.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.full": f"{fleet.e.url}/v1/chat/completions",
        "server.address": "127.0.0.1",
        "server.port": int(fleet.e.url.rpartition(":")[2]),
        "epd.item": "messages[0].content[0]",
        "epd.item.modality": "image",
    }
    assert decode.attributes["url.full"] == f"{fleet.d.url}/v1/chat/completions"
    assert asked_by(fleet.e) == encode.id
    assert asked_by(fleet.d) == decode.id


@pytest.mark.parametrize(
    ("path", "body", "operation", "stages"),
    [
        ("/v1/completions", {"prompt": "?"}, "text_completion", ["prefill", "decode"]),
        ("/v1/responses", {"input": "?"}, "chat", ["prefill", "decode"]),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, "chat", ["prefill", "decode"]),
        ("/v1/messages/count_tokens", {"messages": []}, None, ["decode"]),
        ("/v1/embeddings", {"input": "?"}, "embeddings", ["decode"]),
    ],
)
async def test_a_span_has_the_route_and_the_request_attributes(  # noqa: PLR0913, PLR0917
    launch: Launch,
    collector: Collector,
    path: str,
    body: dict[str, Any],
    operation: str | None,
    stages: list[str],
) -> None:
    async with launch(prefill=1, otlp_traces_endpoint=collector.url) as fleet:
        async with fleet.http.post(fleet.url + path, json=body) as reply:
            assert reply.status == 200
        urls = {"prefill": fleet.p.url + path, "decode": fleet.d.url + path}

    root = only(collector)
    assert root.attributes.get("gen_ai.operation.name") == operation
    assert "gen_ai.request.model" not in root.attributes
    children = {span.name: span.attributes["url.full"] for span in collector.children(root)}
    assert children == {stage: urls[stage] for stage in stages}


async def test_a_clients_trace_is_continued(launch: Launch, collector: Collector) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        async with fleet.post(PICTURE, CLIENTS) as reply:
            assert reply.headers["X-Trace-Id"] == TRACE
        [event] = fleet.events.requests

    root = only(collector)
    assert event.trace_id == TRACE
    assert (root.trace_id, root.parent_id, root.state) == (TRACE, PARENT, "rojo=1,congo=2")
    for instance, span in zip((fleet.e, fleet.d), collector.children(root), strict=True):
        assert asked_by(instance) == span.id
        assert instance.calls[0].headers["tracestate"] == "rojo=1,congo=2"


async def test_an_unsampled_trace_of_a_client_stays_unsampled(
    launch: Launch, collector: Collector
) -> None:
    headers = CLIENTS | {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        await fleet.chat(PICTURE, headers)

    assert collector.spans == []
    for instance in (fleet.e, fleet.d):
        version, trace, span, flags = instance.calls[0].headers["traceparent"].split("-")
        assert (version, trace, flags) == ("00", TRACE, "00")
        assert span != PARENT


async def test_a_client_without_a_valid_trace_gets_a_new_one(
    launch: Launch, collector: Collector
) -> None:
    headers = {"traceparent": "00-1-2-01", "tracestate": "rojo=1"}
    async with (
        launch(otlp_traces_endpoint=collector.url) as fleet,
        fleet.post(PICTURE, headers) as reply,
    ):
        told = reply.headers["X-Trace-Id"]

    root = only(collector)
    assert (root.parent_id, root.state, root.trace_id) == ("", "", told)
    assert asked_by(fleet.d).startswith(told)
    assert "tracestate" not in fleet.d.calls[0].headers


async def test_exported_spans_contain_no_secrets(
    launch: Launch, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-collector-key=k")
    headers = {"Authorization": "Bearer a-secret-key", "X-Request-Id": "mine"}
    async with launch(otlp_traces_endpoint=collector.url, openai_api_key="a-secret-one") as fleet:
        await fleet.chat(PICTURE, headers)

    exported = b"".join(collector.bodies)
    assert collector.headers["x-collector-key"] == "k"
    assert b"epd.request.id" in exported
    assert b"secret" not in exported
    assert PICTURE["messages"][0]["content"][0]["image_url"]["url"].encode() not in exported


async def test_a_hit_has_a_lookup_span_and_no_encode_span(
    launch: Launch, collector: Collector, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url, otlp_traces_endpoint=collector.url) as fleet:
        await fleet.chat(PICTURE)
        await asyncio.gather(*backed.writes)
        await fleet.chat(PICTURE)

    missed, hit = collector.roots
    assert names(collector.children(missed)) == ["store", "encode", "decode"]
    store, decode = collector.children(hit)
    assert (store.name, store.kind, decode.name) == ("store", "INTERNAL", "decode")
    assert hit.attributes["epd.items.hit"] == 1


async def test_a_wait_for_an_encode_has_a_link_to_its_span(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        go_on = asyncio.Event()

        fleet.e.chat = after(go_on, encodes)
        first = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: fleet.e.open == 1)
        second = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: waiters(fleet) == 2)
        go_on.set()
        await asyncio.gather(first, second)

    made, shared = collector.roots
    [encode, _] = collector.children(made)
    [wait, decode] = collector.children(shared)
    assert (encode.name, wait.name, decode.name) == ("encode", "encode wait", "decode")
    assert (wait.kind, wait.failed) == ("INTERNAL", False)
    assert wait.links == ((encode.trace_id, encode.span_id),)
    assert shared.attributes["epd.items.hit"] == 1


async def test_a_wait_for_an_encode_ends_with_its_failure(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url, on_encode_failure="fail") as fleet:
        go_on = asyncio.Event()

        async def fails(*called: Any) -> Any:
            await go_on.wait()
            fleet.e.chat = encodes
            return await refuses(400)(*called)

        fleet.e.chat = fails
        first = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: fleet.e.open == 1)
        second = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: waiters(fleet) == 2)
        go_on.set()
        (refused, _), (answered, _) = await asyncio.gather(first, second)

    assert (refused, answered) == (400, 200)
    wait, encode, decode = collector.children(collector.roots[1])
    assert names([wait, encode, decode]) == ["encode wait", "encode", "decode"]
    assert wait.links == ()
    assert wait.end_ns <= encode.start_ns


async def test_a_wait_for_the_encode_of_another_proxy_is_marked(
    launch: Launch, collector: Collector, backed: Backed, url: str
) -> None:
    backed.encode_s = 0.5
    settings: dict[str, Any] = {"otlp_traces_endpoint": collector.url}
    async with (
        caching(launch, backed, url, **settings) as one,
        caching(launch, backed, url, **settings) as other,
    ):
        first = asyncio.create_task(one.chat(PICTURE))
        await until(lambda: one.e.open == 1)
        await other.chat(PICTURE)
        await first

    assert other.e.calls == []
    assert names(collector.children(collector.roots[1])) == ["store", "encode wait", "decode"]


async def test_each_retry_is_a_child_span_with_its_resend_count(
    launch: Launch, collector: Collector
) -> None:
    async with launch(2, 2, 2, otlp_traces_endpoint=collector.url) as fleet:
        for group, then in ((fleet.encode, encodes), (fleet.decode, decodes)):
            fault = fails_first(1, refuses(502), then)
            for instance in group:
                instance.chat = fault
        status, _ = await fleet.chat(PICTURE)

    assert status == 200
    root = only(collector)
    children = collector.children(root)
    again = "http.request.resend_count"
    tries = [(span.name, span.attributes.get(again), span.error) for span in children]
    assert sorted(tries, key=str) == [
        ("decode", 1, None),
        ("decode", None, "decode_failed"),
        ("encode", 1, None),
        ("encode", None, "encode_failed"),
        ("prefill", 1, None),
        ("prefill", None, None),
        ("release", None, None),  # release of the first prefill
    ]
    assert root.attributes["epd.retries"] == 1
    calls = [asked_by(one, k) for one in fleet.instances for k in range(len(one.calls))]
    assert sorted(calls) == sorted(span.id for span in children)


async def test_an_error_is_named_by_its_slug_and_has_its_status(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        fleet.d.chat = refuses(400)
        await fleet.chat(PICTURE)
        fleet.d.chat = refuses(503)
        await fleet.chat(PICTURE)

    client, server = collector.roots
    for root, status, slug, failed in (
        (client, 400, "decode_rejected", False),
        (server, 503, "decode_failed", True),
    ):
        decode = collector.children(root)[-1]
        assert (root.attributes["http.response.status_code"], root.failed) == (status, failed)
        assert (root.error, decode.error) == (slug, slug)
        assert (decode.attributes["http.response.status_code"], decode.failed) == (status, True)


async def test_a_streams_span_has_events_for_its_head_and_first_token(
    launch: Launch, collector: Collector
) -> None:
    async with (
        launch(otlp_traces_endpoint=collector.url) as fleet,
        fleet.post(request(text(), stream=True)) as reply,
    ):
        await reply.read()

    [decode] = collector.children(only(collector))
    assert decode.events == ("head", "first_token")


async def test_a_stream_that_breaks_is_decodes_error_and_the_requests(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        fleet.d.chat = streams_then(chunk("a"), then=drops)
        async with fleet.post(request(text(), stream=True)) as reply:
            assert b"error" in await reply.read()

    root = only(collector)
    [decode] = collector.children(root)
    assert (decode.error, decode.failed) == ("decode_died", True)
    assert (root.error, root.failed) == ("decode_died", True)
    assert root.attributes["http.response.status_code"] == 200


async def test_a_client_that_leaves_is_seen_on_every_span(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        fleet.d.chat = hangs
        asking = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: fleet.d.open == 1)
        asking.cancel()
        await until(lambda: fleet.events.requests)

    root = only(collector)
    _, decode = collector.children(root)
    assert (decode.error, decode.failed) == ("cancelled", True)
    assert (root.error, root.failed) == ("client_closed", False)
    assert root.attributes["http.response.status_code"] == 499


async def test_spans_of_releases_and_of_queueing_are_children(
    launch: Launch, collector: Collector
) -> None:
    async with launch(prefill=1, otlp_traces_endpoint=collector.url, max_requests=1) as fleet:
        fleet.d.chat = fails_first(1, hangs, decodes)
        first = asyncio.create_task(fleet.chat(PICTURE))
        await until(lambda: fleet.d.open == 1)
        second = asyncio.create_task(fleet.chat(request(text())))
        await until(
            lambda: b"epd_requests_queued 1.0" in generate_latest(fleet.runner.app[METRICS])
        )
        first.cancel()
        await second

    left, waited = collector.roots
    assert names(collector.children(left)) == ["encode", "prefill", "decode", "release"]
    queue, prefill, decode = collector.children(waited)
    assert names([queue, prefill, decode]) == ["queue", "prefill", "decode"]
    assert queue.kind == "INTERNAL"


async def test_health_and_metrics_are_not_traced_and_models_are(
    launch: Launch, collector: Collector
) -> None:
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        for path in ("/health", "/ready", "/metrics", "/nothing", "/v1/models"):
            async with fleet.http.get(fleet.url + path) as reply:
                assert ("X-Trace-Id" in reply.headers) == (path == "/v1/models")

    assert names(collector.roots) == ["GET /v1/models"]


async def test_spans_are_exported_by_grpc_by_default(launch: Launch) -> None:
    with over_grpc() as collector:
        async with launch(otlp_traces_endpoint=collector.url) as fleet:
            await fleet.chat(PICTURE)

        assert names(collector.children(only(collector))) == ["encode", "decode"]


async def test_the_environment_names_the_service_and_samples(
    launch: Launch, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        await fleet.chat(PICTURE)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with launch(otlp_traces_endpoint=collector.url) as fleet:
        await fleet.chat(PICTURE)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with (
        launch(otlp_traces_endpoint=collector.url) as fleet,
        fleet.post(PICTURE, CLIENTS) as reply,
    ):
        assert "X-Trace-Id" not in reply.headers

    assert only(collector).service == "ours"
    assert asked_by(fleet.e) == f"{TRACE}-{PARENT}"


@pytest.mark.parametrize(
    ("protocol", "listens"), [("grpc", False), ("http/protobuf", False), ("http/protobuf", True)]
)
async def test_a_failing_collector_costs_only_a_warning(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    listens: bool,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with capture_logs() as lines, socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        async with launch(otlp_traces_endpoint=url) as fleet:
            for _ in range(3):
                status, _ = await fleet.chat(PICTURE)
                assert status == 200
                await until(lambda: "spans are lost" in {line["event"] for line in lines}, 20)

    [line] = [line for line in lines if line["event"] == "spans are lost"]
    assert (line["log_level"], line["endpoint"]) == ("warning", url)
    assert "Failed to export" in line["reason"]
    assert [record.name for record in caplog.records if "otlp" in record.name] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_every_process_exports_remaining_spans_at_its_end(
    collector: Collector, workers: int
) -> None:
    async def asks(url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            for _ in range(8):
                async with http.get(f"{url}/v1/models") as reply:
                    await reply.read()

    flags = ["--workers", str(workers or 1), "--otlp-traces-endpoint", collector.url]
    with serving(*INSTANCES, *flags) as (url, process):
        assert process.stderr is not None
        for _ in range(workers):
            assert "serving" in process.stderr.readline()
        asyncio.run(asks(url))
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        process.wait(30)

    assert names(collector.roots) == ["GET /v1/models"] * 8
    for root in collector.roots:
        assert root.trace_id in said


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    code = (
        "import asyncio, sys\n"
        "import epd.server.serve\n"
        "from epd import ProxyConfig, create_app\n"
        "from epd.server.app_keys import CONFIG, OBSERVERS\n"
        "from epd.edge.protocol import Runner\n"
        "async def main():\n"
        "    urls = ('http://127.0.0.1:9',)\n"
        "    config = ProxyConfig(encode_servers_urls=urls, decode_servers_urls=urls)\n"
        "    app = create_app(config)\n"
        "    runner = Runner(app, app[CONFIG], app[OBSERVERS])\n"
        "    await runner.setup()\n"
        "    await runner.cleanup()\n"
        "asyncio.run(main())\n"
        "theirs = ('opentelemetry', 'grpc')\n"
        "print([name for name in sys.modules if name.startswith(theirs)])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert ended.stdout == "[]\n"


def test_an_endpoint_without_the_extra_ends_in_one_line() -> None:
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from epd.__main__ import main\n"
        f"main(['serve', *{INSTANCES!r}, '--otlp-traces-endpoint', 'http://c:4317'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert ended.returncode == 2
    assert "--otlp-traces-endpoint needs pip install 'epd-proxy[otel]'" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("endpoint", "protocol", "message"),
    [
        ("http://c:4317", "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/"),
        ("c:4317", "grpc", "--otlp-traces-endpoint 'c:4317' is not a URL"),
        ("http://u:p@c:4317", "grpc", "without a user"),
    ],
)
def test_an_unreachable_collector_is_reported_in_one_line(
    endpoint: str, protocol: str, message: str
) -> None:
    ended = called(
        *("serve", *INSTANCES, "--otlp-traces-endpoint", endpoint),
        env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol},
    )

    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
