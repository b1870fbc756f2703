"""What the queries of the dashboard, the rules and docs/metrics.md have in common."""

import json
from pathlib import Path
from typing import Any

from tests.deploy.expressions import asked, queries
from tests.deploy.tools import DASHBOARD, promtool, rules

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
METRICS = Path(__file__).parents[2] / "docs/metrics.md"
EXPRESSIONS = [*(rule["expr"] for rule in rules()), *queries(BOARD)]


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
