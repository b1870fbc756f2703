"""`GET /metrics` on real sockets: each metric counts its own events, and no others."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from structlog.testing import capture_logs

from epd.observe.metric_defs import METRIC_DEFS
from epd.version import __version__
from tests.requests import data_url, image, input_audio, request, text
from tests.support.backed import Backed, caching
from tests.support.fake_instance import (
    STREAM,
    FakeInstance,
    Handler,
    after,
    decodes,
    drops,
    fails_first,
    hangs,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer
from tests.support.relay import Relay, Way

CHAT = "/v1/chat/completions"
PICTURE = image(b"the picture")
PICTURE_BYTES = len(data_url(b"the picture").partition(",")[2])
TWICE = image(b"twice")
TWICE_BYTES = len(data_url(b"twice").partition(",")[2])

UNFORESEEN = (
    "epd_saved_encode_seconds",
    "epd_store_bytes",
    "epd_inter_chunk",
)
"""Metrics that depend on times, on the store's format, or on the chunks of a stream."""
BESIDE = {"lease", "release", "namespaces"}
"""Operations of the store that run in the background."""

Page = dict[str, float]
Act = Callable[[Fleet], Awaitable[object]]


def named(name: str, **labels: object) -> str:
    return f"{name}{{{','.join(f'{label}={labels[label]}' for label in sorted(labels))}}}"


def counted(name: str, value: float = 1.0, **labels: object) -> Page:
    return {named(name, **labels): value}


def of_m(name: str, value: float = 1.0, **labels: object) -> Page:
    return counted(name, value, model_name="m", **labels)


def asked(operation: str, result: str = "ok") -> Page:
    return counted("epd_store_operations_total", operation=operation, result=result)


def gone_through(*stages: str, model: str = "m") -> Page:
    """Return one count for each stage; `!` marks a failed stage, `?` a rejected request."""
    failed = {"!": "true", "?": "rejected"}
    return {
        named(
            "epd_stage_seconds_count",
            model_name=model,
            stage=stage.rstrip("!?"),
            failed=failed.get(stage[-1], "false"),
        ): 1.0
        for stage in stages
    }


def ended(*stages: str, status: int = 200) -> Page:
    """Return the counts of one chat request."""
    first = of_m("epd_time_to_first_token_seconds_count") if status == 200 else {}
    return {
        **of_m("epd_requests_total", path=CHAT, status=status),
        **of_m("epd_request_seconds_count", path=CHAT),
        **of_m("epd_policy_requests_total", policy="encode_pd"),
        **first,
        **gone_through(*stages),
    }


def hit(saved_bytes: float) -> Page:
    return {
        **of_m("epd_items_total", result="hit"),
        **of_m("epd_items_sent_total", form="metadata"),
        **of_m("epd_saved_encodes_total"),
        **of_m("epd_saved_bytes_total", saved_bytes),
    }


NEW = {
    **of_m("epd_items_total", result="encoded"),
    **of_m("epd_items_sent_total", form="metadata"),
    **asked("lookup"),
    **asked("claim"),
}


async def page(url: str, http: aiohttp.ClientSession) -> Page:
    """Return all counts of the page, except those of scraping it and of background operations."""
    async with http.get(f"{url}/metrics") as reply:
        families = list(read_text(await reply.text()))
    return {
        named(sample.name, **sample.labels): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum", "_lag_seconds"))
        and sample.labels.get("path") != "/metrics"
        and sample.labels.get("operation") not in BESIDE
    }


def moved(before: Page, after: Page) -> Page:
    values = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    return {name: value for name, value in values.items() if value}


def foreseen(found: Page) -> Page:
    return {name: value for name, value in found.items() if not name.startswith(UNFORESEEN)}


async def answer(fleet: Fleet, *parts: Any, status: int = 200, **more: Any) -> None:
    async with fleet.post(request(*parts, text(), **more)) as reply:
        await reply.read()
        assert reply.status == status


async def misbehaving(
    fleet: Fleet, role: str, fault: Handler, *parts: Any, status: int = 200
) -> None:
    """Send a request while an instance has this fault."""
    instance: FakeInstance = getattr(fleet, role)
    usual, instance.chat = instance.chat, fault
    await answer(fleet, *parts, status=status)
    instance.chat = usual


async def drops_once(fleet: Fleet) -> None:
    """Let decode drop two requests: the proxy retries one on a reused connection at once."""
    await misbehaving(fleet, "d", fails_first(2, drops, fleet.d.chat))


async def leaves(fleet: Fleet, role: str, *parts: Any) -> None:
    """Disconnect the client while this instance has its request."""
    instance: FakeInstance = getattr(fleet, role)
    usual, instance.chat = instance.chat, hangs
    calls = len(instance.calls)
    asking = asyncio.create_task(answer(fleet, *parts))
    await until(lambda: len(instance.calls) > calls)
    asking.cancel()
    await until(lambda: fleet.events.requests[-1].status == 499)
    instance.chat = usual


async def leaves_its_stream(fleet: Fleet) -> None:
    usual, fleet.d.chat = fleet.d.chat, streams_then(STREAM[0], then=hangs)
    async with fleet.post(request(text(), stream=True)) as reply:
        await reply.content.readany()
        reply.close()
    await until(lambda: fleet.events.requests[-1].status == 499)
    fleet.d.chat = usual


async def leaves_its_wait_for_another(fleet: Fleet) -> None:
    """Send two requests with one picture; the second leaves while the first encodes it."""
    go_on, usual = asyncio.Event(), fleet.e.chat

    fleet.e.chat = after(go_on, usual)
    encodes, looks = len(fleet.e.calls), len(fleet.events.stages)
    first = asyncio.create_task(answer(fleet, TWICE))
    await until(lambda: len(fleet.e.calls) > encodes)
    second = asyncio.create_task(answer(fleet, TWICE))
    await until(lambda: len(fleet.events.stages) == looks + 2)
    second.cancel()
    await until(lambda: fleet.events.requests[-1].status == 499)
    go_on.set()
    await first
    fleet.e.chat = usual


async def asks_for_another_model(fleet: Fleet) -> None:
    """Ask for a model for which decode answers 404, as vLLM does."""
    usual, fleet.d.chat = fleet.d.chat, refuses(404)
    await answer(fleet, model="who?", status=404)
    fleet.d.chat = usual


CASES: dict[str, tuple[Act, Page]] = {
    "text": (answer, ended("decode")),
    "a stream": (partial(answer, stream=True), ended("decode")),
    "another name for the model": (
        partial(answer, model="alias"),
        # The model is known only after decode has answered.
        {**ended(), **gone_through("decode", model="other")},
    ),
    "a model that is not served": (
        asks_for_another_model,
        {
            **counted("epd_requests_total", model_name="other", path=CHAT, status=404),
            **counted("epd_request_seconds_count", model_name="other", path=CHAT),
            **counted("epd_policy_requests_total", model_name="other", policy="encode_pd"),
            **gone_through("decode?", model="other"),
        },
    ),
    "a new picture": (
        lambda fleet: answer(fleet, image(b"new")),
        {**ended("store", "encode", "decode"), **NEW},
    ),
    "a picture that is there": (
        lambda fleet: answer(fleet, PICTURE),
        {**ended("store", "decode"), **hit(PICTURE_BYTES), **asked("lookup")},
    ),
    "one picture twice": (
        lambda fleet: answer(fleet, TWICE, TWICE),
        {
            **ended("store", "encode", "decode"),
            **NEW,
            **hit(TWICE_BYTES),
            **of_m("epd_items_sent_total", 2, form="metadata"),
            **of_m("epd_encode_waits_total"),
        },
    ),
    "an encoder that fails": (
        lambda fleet: misbehaving(fleet, "e", refuses(503), image(b"unlucky")),
        {
            **ended("store", "encode!", "decode"),
            **of_m("epd_items_total", result="local"),
            **of_m("epd_items_sent_total", form="raw"),
            **of_m("epd_requests_degraded_total", kind="encode-local"),
            **asked("lookup"),
            **asked("claim"),
        },
    ),
    "a decode that drops": (
        drops_once,
        {**ended("decode!", "decode"), **of_m("epd_request_retries_total")},
    ),
    "a request that decode refuses": (
        lambda fleet: misbehaving(fleet, "d", refuses(400), status=400),
        ended("decode?", status=400),
    ),
    "a client that leaves at decode": (
        lambda fleet: leaves(fleet, "d"),
        {**ended("decode!", status=499), **counted("epd_disconnects_total", stage="decode")},
    ),
    "a client that leaves at encode": (
        lambda fleet: leaves(fleet, "e", image(b"left")),
        {
            **ended("store", "encode!", status=499),
            **counted("epd_disconnects_total", stage="encode"),
            **asked("lookup"),
            **asked("claim"),
        },
    ),
    "a client that leaves its stream": (
        leaves_its_stream,
        {
            **ended("decode", status=499),
            **of_m("epd_time_to_first_token_seconds_count"),
            **counted("epd_disconnects_total", stage="answer"),
        },
    ),
    "a client that leaves its wait for another": (
        leaves_its_wait_for_another,
        {
            **ended("encode", "decode"),
            **of_m("epd_stage_seconds_count", 2, stage="store", failed="false"),
            **of_m("epd_requests_total", path=CHAT, status=499),
            **of_m("epd_request_seconds_count", 2, path=CHAT),
            **of_m("epd_policy_requests_total", 2, policy="encode_pd"),
            **NEW,
            **counted("epd_store_operations_total", 2, operation="lookup", result="ok"),
            **counted("epd_store_operations_total", operation="claim", result="ok"),
            **counted("epd_disconnects_total", stage="encode"),
        },
    ),
    "no route": (
        lambda fleet: fleet.http.get(f"{fleet.url}/none"),
        {
            **counted("epd_requests_total", model_name="", path="unknown", status=404),
            **counted("epd_request_seconds_count", model_name="", path="unknown"),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_each_metric_changes_only_with_its_cause(
    launch: Launch, backed: Backed, url: str, case: str
) -> None:
    act, expected = CASES[case]
    async with caching(launch, backed, url) as fleet:
        await answer(fleet, PICTURE)  # from now on the proxy knows the model name "m"
        await asyncio.gather(*backed.writes)
        before = await page(fleet.url, fleet.http)
        await act(fleet)
        found: Page = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while foreseen(found) != expected:
                    found = moved(before, await page(fleet.url, fleet.http))

    assert foreseen(found) == expected
    times = {name for name in found if name.startswith("epd_saved_encode_seconds")}
    assert bool(times) is (named("epd_saved_encodes_total", model_name="m") in expected)
    there = {name for name in found if name.startswith("epd_store_bytes")}
    assert bool(there) is (case == "a picture that is there")


async def test_the_time_between_chunks_is_observed_for_each_chunk(launch: Launch) -> None:
    taken = asyncio.Event()

    async def in_turn(asked: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked)
        for event in STREAM:
            await response.write(event)
            await taken.wait()
            taken.clear()
            await asyncio.sleep(0.06)
        return response

    async with launch() as fleet:
        fleet.d.chat = in_turn
        async with fleet.post(request(text(), stream=True)) as reply:
            async for _ in reply.content.iter_any():
                taken.set()
        async with fleet.http.get(f"{fleet.url}/metrics") as answered:
            found = {
                sample.name + sample.labels.get("le", ""): sample.value
                for family in read_text(await answered.text())
                for sample in family.samples
                if family.name == "epd_inter_chunk_seconds"
            }

    assert found["epd_inter_chunk_seconds_count"] == len(STREAM) - 1
    assert found["epd_inter_chunk_seconds_bucket0.05"] == 0
    assert found["epd_inter_chunk_seconds_bucket+Inf"] == len(STREAM) - 1
    assert found["epd_inter_chunk_seconds_sum"] >= 0.06 * (len(STREAM) - 1)


@pytest.mark.parametrize(
    ("release", "result"), [(decodes, "ok"), (refuses(500), "ok"), (refuses(503), "failed")]
)
async def test_an_abandoned_prefill_is_released_and_counted(
    launch: Launch, release: Handler, result: str
) -> None:
    async with launch(prefill=1) as fleet:
        fleet.d.chat = hangs
        asking = asyncio.create_task(answer(fleet))
        await until(lambda: fleet.d.calls)
        fleet.d.chat = release
        asking.cancel()
        await until(lambda: any(one.stage == "release" for one in fleet.events.stages))
        found = await page(fleet.url, fleet.http)

    releases = {name: value for name, value in found.items() if "kv_releases" in name}
    assert releases == counted("epd_kv_releases_total", result=result)


async def test_metrics_show_the_bandwidth_of_kv_transfers(launch: Launch) -> None:
    moved = [0.0, 0.0]

    async def metrics() -> web.Response:
        moved[0] += 3e8
        moved[1] += 0.5
        lines = [
            "vllm:num_requests_running 0",
            "vllm:num_requests_waiting 0",
            f"vllm:nixl_bytes_transferred_sum {moved[0]}",
            f"vllm:nixl_xfer_time_seconds_sum {moved[1]}",
        ]
        return web.Response(text="\n".join(["", *lines, ""]))

    async with launch(prefill=1, load_interval_s=0.05) as fleet:
        fleet.d.metrics = metrics
        await until(lambda: moved[0] > 1e9)
        found = await page(fleet.url, fleet.http)

    bandwidths = {name: value for name, value in found.items() if "epd_kv_transfer" in name}
    labels = {"role": "decode", "instance": fleet.d.url}
    assert bandwidths == {named("epd_kv_transfer_bytes_per_second", **labels): 6e8}


async def test_metrics_show_the_role_and_the_load_of_each_instance(launch: Launch) -> None:
    async with launch(eject_after=1) as fleet:
        labels = {"role": "prefill_decode", "instance": fleet.d.url}
        up, at_it = named("epd_instance_up", **labels), named("epd_instance_requests", **labels)
        before = await page(fleet.url, fleet.http)
        fleet.d.chat = hangs
        asking = asyncio.create_task(answer(fleet))
        await until(lambda: fleet.d.calls)
        meanwhile = await page(fleet.url, fleet.http)
        asking.cancel()
        await until(lambda: fleet.events.requests[-1].status == 499)
        await misbehaving(fleet, "d", refuses(502), status=502)
        after = await page(fleet.url, fleet.http)

    assert (before[up], before[at_it]) == (1, 0)
    assert (meanwhile[up], meanwhile[at_it]) == (1, 1)
    assert (after[up], after[at_it]) == (0, 0)
    ejected = named("epd_instance_changes_total", role="prefill_decode", state="ejected")
    assert moved(before, after)[ejected] == 1


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


async def test_a_store_that_fails_is_counted_and_its_circuit_opens(
    launch: Launch, backed: Backed, redis: RedisServer
) -> None:
    async with Relay(redis).running() as relay:
        url = relay.url("timeout=2s")
        async with caching(launch, backed, url, ec_store_budget_s=1.0) as fleet:
            before = await page(fleet.url, fleet.http)
            relay.answers = Way(cut_after=0, end="reset")
            relay.listener.reset_all()
            with capture_logs() as lines:
                for number in range(6):  # the first one finds the namespace
                    await answer(fleet, image(b"%d" % number))
            after = await page(fleet.url, fleet.http)
        backed.store.close()

    opened = [one["event"] for one in lines if "skipping it for 5 s" in one["event"]]
    assert [one.partition(" keeps")[0] for one in opened] == ["reading from the encoder store"]
    circuit = named("epd_circuit_open", circuit="store_questions")
    assert (before[circuit], after[circuit]) == (0, 1)
    looks = {name: value for name, value in after.items() if "{operation=lookup,r" in name}
    failed = named("epd_store_operations_total", operation="lookup", result="error")
    skipped = named("epd_store_operations_total", operation="lookup", result="skipped")
    assert looks == {failed: 3, skipped: 2}


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text;version=1.0.0"])
async def test_the_page_has_the_requested_format(
    launch: Launch, backed: Backed, url: str, accept: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await answer(fleet, PICTURE, stream=True)
        await answer(fleet, input_audio())
        async with fleet.http.get(f"{fleet.url}/metrics", headers={"Accept": accept}) as reply:
            kind, said = reply.headers["Content-Type"], await reply.text()
    openmetrics = "openmetrics" in accept
    families = list((read_openmetrics if openmetrics else read_text)(said))

    assert kind.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    assert {family.name: family.type for family in families} == {
        name: one.kind for name, one in METRIC_DEFS.items()
    }
    for sample in (sample for family in families for sample in family.samples):
        assert not sample.name.endswith("_created")
        name = re.sub("_(total|bucket|count|sum)$", "", sample.name)
        assert {*sample.labels} - {"le"} == {*METRIC_DEFS[name].labels}
    assert named("epd_build_info", version=__version__) in {
        named(sample.name, **sample.labels) for family in families for sample in family.samples
    }
