"""Dashboard and rules use only metrics that exist: a real Prometheus scrapes a real proxy."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ec_store import open_store
from tests.deploy.expressions import Asked, asked, plain, queries
from tests.deploy.prometheus_server import Prometheus, prometheus
from tests.deploy.tools import DASHBOARD, promtool, rules
from tests.requests import image, request
from tests.support.backed import NAMESPACE, Backed, caching
from tests.support.fake_instance import hangs, refuses
from tests.support.fleet import Fleet, Launch, until

ADMIN = "0123456789abcdef0123456789abcdef"
WITHIN_S = 60.0
BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
METRICS = Path(__file__).parents[2] / "docs/metrics.md"
EXPRESSIONS = [*(rule["expr"] for rule in rules()), *queries(BOARD)]
OURS = ("epd_", "up")


async def traffic(fleet: Fleet, backed: Backed) -> None:
    """Cause at least one count of every metric."""
    for content in (b"cat", b"cat", b"dog"):
        async with fleet.post(request(image(content), stream=True)) as reply:
            assert reply.status == 200
            await reply.read()
    await one_waits_for_the_other(fleet, backed)
    await a_client_leaves(fleet)
    fleet.d.chat, decodes = refuses(500), fleet.d.chat
    await fleet.chat(request(image(b"cat")))
    fleet.d.chat = decodes
    for instance in fleet.encode:
        instance.chat, instance.healthy = refuses(500), False
    assert (await fleet.chat(request(image(b"fish"))))[0] == 200
    await until(lambda: fleet.events.changes, WITHIN_S)


async def one_waits_for_the_other(fleet: Fleet, backed: Backed) -> None:
    """Send two concurrent requests with the same picture."""
    backed.encode_s = 0.2
    await asyncio.gather(*(fleet.chat(request(image(b"bird"))) for _ in range(2)))
    backed.encode_s = 0


async def a_client_leaves(fleet: Fleet) -> None:
    """Disconnect a client after prefill, while decode has the request."""
    fleet.d.chat, decodes = hangs, fleet.d.chat
    before = len(fleet.d.calls)
    task = asyncio.create_task(fleet.chat(request(image(b"cat"))))
    await until(lambda: len(fleet.d.calls) > before, WITHIN_S)
    fleet.d.chat = decodes
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def scraped(launch: Launch, url: str, tmp_path: Path) -> AsyncIterator[Prometheus]:
    """Return Prometheus after it has scraped a busy proxy."""
    with open_store(url) as store:
        store.register_namespace("m", NAMESPACE)
        backed = Backed(store, tmp_path / "store")
        async with caching(
            launch, backed, url, prefill=1, admin_api_key=ADMIN, probe_interval_s=0.1
        ) as fleet:
            await traffic(fleet, backed)
            target = fleet.url.removeprefix("http://")
            async with prometheus(tmp_path, target, ADMIN) as server:
                await recorded(server)
                yield server


async def recorded(server: Prometheus) -> None:
    """Wait until Prometheus has scraped twice and evaluated the recording rules."""
    async with asyncio.timeout(WITHIN_S):
        while await server.value("count(stage:epd_stage_failed:ratio_rate5m)") is None:  # noqa: ASYNC110 - Prometheus sets no event
            await asyncio.sleep(0.2)


async def labels_of(server: Prometheus, name: str) -> set[str]:
    """Return the labels of a metric over all its series."""
    series = await server.get("series", **{"match[]": name})
    return {label for one in series for label in one}


async def missing(server: Prometheus, wanted: set[Asked]) -> list[str]:
    """Return the metrics and labels that expressions use but the proxy does not have."""
    found = []
    for name, labels in sorted(wanted, key=str):
        has = await labels_of(server, name)
        absent = sorted(labels - has)
        found += [f"{name} has no label {label}" for label in absent] if has else [f"no {name}"]
    return found


async def test_metrics_of_dashboard_and_rules_exist(scraped: Prometheus) -> None:
    wanted = {one for expr in EXPRESSIONS for one in asked(expr) if one[0].startswith(OURS)}
    nonsense = {("epd_nonsense", frozenset[str]()), ("epd_items_total", frozenset({"nonsense"}))}

    assert len(await missing(scraped, nonsense)) == 2
    assert await missing(scraped, wanted) == []
    for expr in queries(BOARD):
        await scraped.get("query", query=plain(expr))  # every expression can be evaluated
    groups = (await scraped.get("rules"))["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == {
        rule.get("alert") or rule["record"] for rule in rules()
    }
    assert all(rule["health"] != "err" for group in groups for rule in group["rules"])


def documented() -> list[str]:
    """Return the queries in docs/metrics.md."""
    _, _, questions = METRICS.read_text().partition("## Queries")
    return [line.strip() for line in questions.splitlines() if line.startswith("    ")]


def test_probes_and_polling_are_not_counted_as_requests() -> None:
    """A `GET /health` that answers 503 every second does not count as a failed request."""
    of_requests = [
        (expr, labels)
        for expr in [*EXPRESSIONS, *documented()]
        for name, labels in asked(expr)
        if name.startswith(("epd_requests_total", "epd_request_seconds"))
    ]

    assert of_requests
    assert [expr for expr, labels in of_requests if "path" not in labels] == []


def test_recorded_and_used_metrics_are_the_same() -> None:
    used = {name for expr in EXPRESSIONS for name, _ in asked(expr)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}

    assert {name for name in used if ":" in name and not name.startswith("vllm:")} == recorded


def test_promtool_finds_nothing_wrong() -> None:
    ended = promtool(
        "check", "rules", "--lint=all", "--lint-fatal", "recording.yaml", "alerts.yaml"
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
