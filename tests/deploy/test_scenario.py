"""Real Prometheus, proxies and `ec-store serve`: panels have data, alerts fire and resolve."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from tests.deploy.expressions import asked, plain, queries
from tests.deploy.prometheus_server import Prometheus, prometheus, shortened
from tests.deploy.scenario import ADMIN, running
from tests.deploy.test_alerts import ALERTS, CASES
from tests.deploy.tools import DASHBOARD, rules

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
HEALTHY_S = 8.0
WITHIN_S = 120.0

VARIABLES = {"$__rate_interval": "5s", "$__range": "1m", "$model": ".*", "$proxy": ".*"}

NOT_HERE: Mapping[str, str] = {
    "EpdNoProxy": "fires without any proxy",
    "EpdFirstTokenSlow": "a first token takes 10 s",
    "EpdKvNearlyLost": "decode takes the blocks after 15 s",
    "EpdCacheHitsFell": "compares with the day before",
    "EpdStorePinOld": "a pin is an hour old",
    "EpdLoopStalls": "the event loop is late by 0.1 s, as on a busy machine",
    "EpdBackgroundFails": "needs a bug",
    "EpdVersionsMixed": "two versions run for an hour",
}
"""Alerts that do not fire in the scenario, with the reason. promtool tests them, with series
that have the labels of those in the scenario."""


async def firing(server: Prometheus) -> set[str]:
    """Return the alerts that fire. The event loop of a busy machine is late."""
    return await server.firing() - {"EpdLoopStalls"}


async def until_firing(server: Prometheus, wanted: set[str]) -> set[str]:
    """Wait until each wanted alert has fired; return all that have."""
    fired: set[str] = set()
    try:
        async with asyncio.timeout(WITHIN_S):
            while not wanted <= fired:
                fired |= await firing(server)
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"these did not fire: {sorted(wanted - fired)}")
    return fired


async def until_resolved(server: Prometheus) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            while left := await firing(server):  # noqa: ASYNC110 - Prometheus sets no event
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"these did not resolve: {sorted(left)}")


async def unlike(server: Prometheus) -> list[str]:
    """Return series of promtool's tests with labels that the series of the scenario do not have."""
    found = []
    for case in CASES.values():
        for series in {**case.fires, **case.quiet}:
            selector = promql_parser.parse(series)
            assert isinstance(selector, promql_parser.VectorSelector)
            labels = {matcher.name for matcher in selector.matchers.matchers}
            missing = labels - await server.labels_of(str(selector.name))
            found += [f"{series}: {sorted(missing)}"] if missing else []
    return found


async def without_labels(server: Prometheus) -> list[str]:
    """Return the labels that dashboard and rules use and that their metrics do not have."""
    exprs = [*queries(BOARD), *(rule["expr"] for rule in rules())]
    return [
        f"{name} has no label {label}"
        for name, labels in sorted({each for expr in exprs for each in asked(expr)}, key=str)
        for label in labels - await server.labels_of(name)
    ]


async def without_data(server: Prometheus) -> list[str]:
    """Return the queries of the dashboard and the recorded metrics that never had a value."""
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    exprs = [*(plain(expr, VARIABLES) for expr in queries(BOARD)), *recorded]
    return [expr for expr in exprs if not await server.has_data(expr)]


@pytest.mark.full
async def test_panels_have_data_and_alerts_fire_and_resolve(tmp_path: Path) -> None:
    wanted = set(ALERTS) - set(NOT_HERE)
    async with (
        running(tmp_path) as scenario,
        prometheus(tmp_path, scenario.targets, ADMIN) as server,
    ):
        await asyncio.sleep(HEALTHY_S)
        assert await firing(server) == set()
        await scenario.break_all()
        fired = await until_firing(server, wanted)
        await scenario.mend_all()
        await until_resolved(server)

        assert fired == wanted
        assert await without_data(server) == []
        assert not await server.has_data("epd_nonsense")
        assert await without_labels(server) == []
        assert await unlike(server) == []
        groups = (await server.get("rules"))["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


def test_rules_are_shortened_and_recorded_names_are_not() -> None:
    rule = {"expr": "x:y:rate5m > avg_over_time(x:y:rate1h[1d] offset 1h)", "for": "30m"}

    assert shortened({"groups": [{"rules": [rule]}]})["groups"][0]["rules"] == [
        {
            "expr": "x:y:rate5m > avg_over_time(x:y:rate1h[1440000ms] offset 60000ms)",
            "for": "30000ms",
        }
    ]
