"""The dashboard is valid for Grafana: panels, positions, queries, variables."""

import json
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from tests.deploy.expressions import panels, queries
from tests.deploy.tools import DASHBOARD, DEPLOY, load

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ROWS = (
    *("Overview", "Cache & savings", "Stages", "Instances", "Limits & faults"),
    *("Engines (vLLM)", "Store"),
)
PLOTS = {"stat", "timeseries", "heatmap", "state-timeline"}


def test_dashboard_rows_are_those_of_the_guide() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]

    assert rows == list(ROWS)
    guide = (DEPLOY.parent / "docs/guides/monitoring.md").read_text()
    assert [row for row in ROWS if f"**{row}**" not in guide] == []


def test_panel_ids_are_unique() -> None:
    ids = Counter(panel["id"] for panel in BOARD["panels"])

    assert set(ids.values()) == {1}


def test_no_panel_lies_on_another_or_outside() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]

    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@pytest.mark.parametrize("panel", panels(BOARD), ids=lambda panel: str(panel["title"]))
def test_panels_query_the_selected_data_source(panel: dict[str, Any]) -> None:
    assert panel["type"] in PLOTS
    assert panel["title"]
    assert "unit" in panel["fieldConfig"]["defaults"] or panel["type"] not in {"stat", "timeseries"}
    assert [panel["datasource"], *(one["datasource"] for one in panel["targets"])] == [
        SOURCE for _ in range(len(panel["targets"]) + 1)
    ]
    assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])


def test_the_variables_are_defined_and_used() -> None:
    variables = {one["name"]: one for one in BOARD["templating"]["list"]}

    assert list(variables) == ["datasource", "model", "proxy"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("model", "proxy"):
        assert variables[name]["allValue"] == ".*"
        assert any(f"${name}" in expr for expr in queries(BOARD))


def test_compose_provisions_it_and_its_data_source() -> None:
    grafana = DEPLOY / "grafana" / "provisioning"
    [source] = load(grafana / "datasources" / "prometheus.yaml")["datasources"]
    [provider] = load(grafana / "dashboards" / "epd.yaml")["providers"]
    services = load(DEPLOY / "compose.yaml")["services"]

    assert source["type"] == SOURCE["type"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
