"""The page of a comparison, its plots, and where arms break even."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epd.tools.bench.compare.figures import Figures
from epd.tools.bench.compare.hit_rates import RatePoint, crossover, rate_points, time_line
from epd.tools.bench.compare.page import page
from epd.tools.bench.compare.plots import bars
from epd.tools.bench.compare.report import ArmResult, Results
from tests.tools.bench.compare.test_command import figures

MACHINE = {"cores": 2, "cpu": "c", "system": "s", "python": "3"}


def results(arms: Mapping[str, Mapping[str, Figures]], **more: Any) -> Results:
    return Results(
        command=["epd", "bench"],
        started_at=datetime.now(UTC),
        model="<m>",
        scale="small",
        tolerance=0.05,
        facts={"machine": MACHINE, "gpus": [], "versions": {}},
        arms={name: ArmResult([], workloads=dict(arm)) for name, arm in arms.items()},
        **{"end": "", **more},
    )


def of_hits(hits: int, rate: float, **more: Any) -> Figures:
    return figures(rate, items={"hit": hits, "encoded": 8 - hits, "local": 0}, **more)


ARMS = {
    "plain": {"a": figures(10.0), "b": figures(10.0), "t": figures()},
    "epd": {"a": of_hits(0, 8.0), "b": of_hits(8, 20.0), "t": figures()},
    "example": {"a": figures(7.0), "b": figures(9.0), "t": figures()},
}


def test_page_has_each_arm_of_each_workload_and_nothing_from_elsewhere() -> None:
    text = page(results(ARMS))
    drawings = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]  # noqa: S314

    assert [drawing.get("aria-label") for drawing in drawings] == [
        *("a, 4 at once", "b, 4 at once", "t, 4 at once"),
        "requests/s over those of plain vLLM",
    ]
    for drawing in drawings[:3]:
        titles = [title.text or "" for title in drawing.iter("title")]
        assert [title.partition(":")[0] for title in titles] == [*ARMS]
    assert "epd, b: 2.00x at 100%" in [title.text for title in drawings[3].iter("title")]
    assert not re.search(r"<script|src=|href=|url\(|@import", text)
    assert "<m>, small" not in text
    assert escape("<m>, small") in text


def test_page_of_a_run_that_was_cut_off_has_what_was_measured() -> None:
    text = page(results({"plain": {}, "epd": {}}, end="a <signal>"))

    assert "Cut off: a &lt;signal&gt;" in text
    assert "No arm has requests/s with media" in text


def test_an_arm_without_counts_has_the_hit_rates_of_another() -> None:
    points = rate_points(ARMS)

    assert [*points] == ["epd", "example"]
    assert points["example"] == [RatePoint("a", 0.0, 0.7), RatePoint("b", 1.0, 0.9)]
    failing = {**ARMS, "epd": {"a": of_hits(0, 8.0, failed=1), "b": of_hits(8, 20.0)}}
    assert [point.workload for point in rate_points(failing)["epd"]] == ["b"]


@given(
    st.floats(0.1, 0.9),
    st.floats(0.1, 0.9),
    st.lists(st.floats(0, 1), min_size=2, max_size=9, unique=True),
)
def test_an_arm_breaks_even_where_its_requests_take_as_long(
    share: float, saved: float, hit_rates: list[float]
) -> None:
    """A request takes `saved` less with each hit, and as long as plain vLLM's at `share`."""
    assume(max(hit_rates) - min(hit_rates) > 0.01)
    points = [RatePoint("w", rate, 1 / (1 + saved * (share - rate))) for rate in sorted(hit_rates)]
    line = time_line(points)

    assert line is not None
    assert line.break_even == pytest.approx(share, abs=1e-3)
    assert line.gain_at(share) == pytest.approx(1, abs=1e-3)
    assert f"at a hit rate of about {line.break_even:.0%}" in crossover("epd", points)


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ((1.2, 1.5), "answers more requests/s than plain vLLM at hit rates of 20% to 80%"),
        ((0.8, 0.9), "answers no more requests/s than plain vLLM"),
        ((0.8, 0.8), "answers no more requests/s than plain vLLM"),
        ((1.2, 0.8), "does not gain more with more hits"),
        ((0.8, 1.2), "breaks even with plain vLLM at a hit rate of about 56%"),
    ],
)
def test_crossover_says_where_an_arm_gains(gains: tuple[float, float], sentence: str) -> None:
    points = [RatePoint("w", rate, gain) for rate, gain in zip((0.2, 0.8), gains, strict=True)]

    assert sentence in crossover("epd", points)
    assert time_line(points[:1] * 2) is None


@given(st.floats(0, 1e6), st.floats(1, 10))
def test_bars_stay_within_round_steps(low: float, factor: float) -> None:
    drawing = ET.fromstring(  # noqa: S314 - its own
        re.findall(r"<svg.*</svg>", bars("<t>", {"a": (low, low * factor)}, ["a"]))[0]
    )
    steps = [float(text.text or "") for text in drawing.iter("text") if text.get("class") == "soft"]

    assert steps[0] == 0
    assert steps[-1] >= low * factor * (1 - 1e-5)
    assert len(steps) <= 6
    widths = [after - before for before, after in pairwise(steps)]
    assert widths == pytest.approx([widths[0]] * len(widths), rel=1e-3)
