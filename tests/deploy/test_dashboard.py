"""The dashboard is the one of the guide, and Grafana finds it and its data source."""

import json
from itertools import combinations
from typing import Any

from tests.deploy.tools import DASHBOARD, DEPLOY, load

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
WIDTH = 24
ROWS = (
    *("Overview", "Cache & savings", "Stages", "Instances", "Limits & faults"),
    *("Engines (vLLM)", "Store"),
)


def test_dashboard_rows_are_those_of_the_guide() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]

    assert rows == list(ROWS)
    guide = (DEPLOY.parent / "docs/guides/monitoring.md").read_text()
    assert [row for row in ROWS if f"**{row}**" not in guide] == []


def test_no_panel_lies_on_another_or_outside() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]

    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_compose_provisions_it_and_its_data_source() -> None:
    grafana = DEPLOY / "grafana" / "provisioning"
    [source] = load(grafana / "datasources" / "prometheus.yaml")["datasources"]
    [provider] = load(grafana / "dashboards" / "epd.yaml")["providers"]
    services = load(DEPLOY / "compose.yaml")["services"]

    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
