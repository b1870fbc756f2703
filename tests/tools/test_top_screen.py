import io
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from epd.tools.top_screen import (
    WITH_CAUSES,
    bar,
    frame,
    spark,
    strip_control,
)
from epd.ui.formats import seconds_text
from epd.ui.state import UiState
from tests.ui.states import CAUSES, large


def drawn(state: UiState | None, width: int, height: int | None, failure: str = "") -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height or 500, force_terminal=False)
    console.print(frame(state, width, height, failure))
    return out.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("each", [1, 2, 20])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (80, 16), (200, 60)])
def test_a_frame_fits_and_has_all_parts(each: int, width: int, height: int) -> None:
    lines = drawn(large(each), width, height)
    text = "\n".join(lines)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    for part in (
        "Saved 830 encodes",
        "312 MB",
        "148 s of encoding",
        "Hit rate 83 %; 93 % of media sent as metadata, 70 raw.",
        "Of 60 turns, 75 % reused",
        "encode",
        "Ended",
    ):
        assert part in text


def test_a_short_frame_shows_unhealthy_instances_first() -> None:
    text = "\n".join(drawn(large(20), 80, 24))

    assert "✕ down" in text
    assert "● healthy" not in text
    assert "more" in text


def test_rejected_requests_are_shown_apart_from_failed_ones() -> None:
    shown = large(1)
    shown["minute"] |= {"failed": 2, "rejected": 3}
    shown["stages"] = [one for one in shown["stages"] if one["stage"] == "encode"]
    for one in (*shown["instances"], *shown["stages"]):
        one["failed"], one["rejected"] = 41, 57
    lines = drawn(shown, 100, None)

    assert "last minute: 2 failed, 3 rejected" in "\n".join(lines)
    assert [line.split()[-2:] for line in lines if line.startswith(("E1", "encode"))] == [
        ["41", "57"]
    ] * 2
    assert [line.split()[-2:] for line in lines if line.startswith("Stage")] == [["failed", "rej."]]


@given(st.integers(0, 10**7), st.integers(0, 10**5), st.sampled_from([40, 60, 80, 100]))
def test_no_line_above_the_instances_is_cut(number: int, seconds: int, width: int) -> None:
    state = cast("dict[str, Any]", large(1))
    state["totals"] |= {"in_flight": number, "queued": number}
    state["minute"] |= {"failed": number, "rejected": number}
    for name in ("first_token", "answered"):
        state[name] |= {"count": number + 1, "p50_s": seconds / 7, "p90_s": seconds / 3}
    state["stores"][0] |= {"entries": number, "evictions": number}
    lines = drawn(cast("UiState", state), width, None)
    head = lines[: next(at for at, line in enumerate(lines) if "Instance" in line)]
    text = " ".join(" ".join(head).split())

    assert max(map(len, head)) <= width
    assert "…" not in text
    assert f"{number:,} in flight, {number:,} queued; last minute:" in text
    assert f"{number:,} failed, {number:,} rejected" in text
    assert f"TTFT p50 {seconds_text(seconds / 7)}, p90 {seconds_text(seconds / 3)} of" in text
    assert f"{number:,} entries, {number:,} eviction" in text


def test_stores_are_shown_as_on_the_page() -> None:
    state = cast("dict[str, Any]", large(1))
    [known, _] = state["stores"]
    state["stores"] += [{**known, "name": f"10.0.0.{number}"} for number in range(3, 5)]
    state["stores"][2] |= {"max_bytes": None, "entries": None, "evictions": None}
    lines = drawn(cast("UiState", state), 80, None)

    assert [line for line in lines if line.startswith("Store")] == [
        "Store 10.0.0.1:7000 █████░░░░░░░ 1.7 GB of 4.0 GB, 1,234 entries, 56 evictions",
        "Store 10.0.0.2:7000 unknown: no figures from the store, requests bypass it",
        "Store 10.0.0.3 1.7 GB, no quota, entries unknown, evictions unknown",
        "Store 10.0.0.4 █████░░░░░░░ 1.7 GB of 4.0 GB, 1,234 entries, 56 evictions",
    ]
    assert "and 2 stores more" in drawn(cast("UiState", state), 80, 30)


def test_a_narrow_frame_keeps_names_and_failures_of_instances() -> None:
    lines = drawn(large(2), 60, 40)

    assert max(map(len, lines)) <= 60
    [title] = [line for line in lines if "Instance" in line]
    assert title.split() == ["Instance", "failed", "rej."]
    assert {line.split()[0] for line in lines if "● healthy" in line} == {"E1", "P1", "D1"}


def test_top_shows_all_instances_without_a_height() -> None:
    text = "\n".join(drawn(large(20), 100, None))

    for name in ("E1 ", "E20", "P20", "D20"):
        assert name in text


def test_a_proxy_that_stopped_answering_is_shown_as_such() -> None:
    lines = drawn(large(1), 80, 24, "connection refused")

    assert "no answer: connection refused" in lines[0]
    assert "Saved 830 encodes" in lines[1]
    assert drawn(None, 80, 24, "connection refused") == ["connection refused"]


def test_external_text_has_no_terminal_control_characters() -> None:
    text = "\n".join(drawn(large(2, "\x1b[2J\x1b]0;title\x07[red]"), 200, None))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert "·[2J·]0;title·[red]" in text


def test_an_unknown_state_is_shown_unchanged() -> None:
    state = cast("dict[str, Any]", large(1))
    state["instances"] = state["instances"][:1]
    state["stages"] = [one for one in state["stages"] if not one["count"]]
    state["requests"] = state["notices"] = []
    text = "\n".join(drawn(cast("UiState", state), 80, 24))

    assert "E1" in text


@pytest.mark.parametrize("width", [80, 119, 120, 200])
def test_the_cause_of_a_state_is_shown_where_there_is_room(width: int) -> None:
    state = large(4)
    lines = drawn(state, width, None)
    wide = width >= WITH_CAUSES

    assert max(map(len, lines)) <= width
    for word, cause in CAUSES.items():
        assert any(f" {word}: {cause}" in line for line in lines) is wide
        assert any(line.endswith(f" encode {cause}") for line in lines)


@given(st.text())
def test_top_prints_no_control_characters(text: str) -> None:
    assert strip_control(text).isprintable()


def test_graphs() -> None:
    assert spark([0, 1, 2]) == " ▄█"
    assert spark([]) == ""
    assert bar(0.5, 6) == "███"
    assert bar(2.0, 2) == "██"
