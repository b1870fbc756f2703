"""Runs of `epd bench serve`, read from a proxy and from vLLM."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from epd.config import ProxyConfig
from epd.edge.admission import Admission
from epd.events import ItemResult, RequestRecord, StageDone
from epd.observe.metrics import MetricsObserver
from epd.tools.bench.dataset import Dataset
from epd.tools.bench.runs import (
    Run,
    bench_command,
    result_document,
    run_of,
    summary,
)
from epd.tools.bench.targets import BenchModel, BenchTarget, Items, parse_items

TARGET = BenchTarget("epd", "http://h:1")
DATASET = Dataset("local", "/data", (0, 1, 0, 0))
NOTHING = Items(0, 0, 0, 0)
COUNTED = Items(hits=2, encoded=2, local=0, encodes=2)


def detailed(ttfts: list[float], tokens: list[int], errors: list[str]) -> dict[str, Any]:
    """Return a result of `vllm bench serve --save-detailed` with the fields that are read."""
    latencies = {
        f"{figure}_{name}_ms": value
        for name in ("ttft", "tpot")
        for figure, value in (("mean", 2.0), ("median", 1.0), ("p99", 3.0))
    }
    return {
        **latencies,
        "ttfts": ttfts,
        "output_lens": tokens,
        "errors": errors,
        "completed": sum(map(bool, tokens)),
        "failed": len(tokens) - sum(map(bool, tokens)),
        "request_throughput": 4.0,
        "output_throughput": 32.0,
    }


ALL_ANSWERED = detailed([0.4, 0.6, 0.1, 0.2], [8] * 4, [""] * 4)


def run(items: Items | str = COUNTED, **changes: Any) -> Run:
    return run_of(TARGET, DATASET, ALL_ANSWERED | changes, 8, NOTHING, items)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://h:1", BenchTarget("h:1", "http://h:1")),
        ("https://h/", BenchTarget("h", "https://h")),
        ("http://h:1/v1", BenchTarget("h:1", "http://h:1")),
        ("plain=http://h:1", BenchTarget("plain", "http://h:1")),
    ],
)
def test_a_target_is_a_url_that_may_have_a_name(text: str, target: BenchTarget) -> None:
    assert BenchTarget.parse(text) == target


@pytest.mark.parametrize(
    "text", ["", "h:1", "ftp://h", "=http://h", "http://", "a b=http://h", "http://u:p@h"]
)
def test_an_invalid_url_is_not_a_target(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"is not \[NAME=\]http"):
        BenchTarget.parse(text)


def metrics_of_nothing() -> MetricsObserver:
    config = ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
    return MetricsObserver(Admission(config, lambda: 0.0))


def answered(items: Mapping[ItemResult, int]) -> RequestRecord:
    return RequestRecord("r", "POST", "/v1/chat/completions", status=200, items=items)


def test_items_are_read_from_the_proxys_metrics() -> None:
    metrics = metrics_of_nothing()
    metrics.request_done(answered({"hit": 3, "encoded": 2}))
    metrics.request_done(answered({"local": 1}))
    for error in (None, None, "timeout"):
        metrics.stage_done(StageDone("encode", "http://e", 0.0, 0.1, error))
    metrics.stage_done(StageDone("decode", "http://d", 0.0, 0.1, None))

    assert parse_items(generate_latest(metrics).decode()) == Items(
        hits=3, encoded=2, local=1, encodes=2
    )


def test_a_proxy_that_has_answered_nothing_has_counted_nothing() -> None:
    metrics = metrics_of_nothing()

    assert parse_items(generate_latest(metrics).decode()) == NOTHING


def test_parse_items_rejects_metrics_of_other_servers() -> None:
    with pytest.raises(ValueError, match="not an EPD proxy"):
        parse_items("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n")


@given(st.text())
def test_a_page_is_read_or_refused(page: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of the parser
        parse_items(page)


def test_first_token_times_of_new_and_known_pictures_are_separated() -> None:
    ran = run()

    assert (ran.ttft_new_ms, ran.ttft_seen_ms) == pytest.approx((500, 150))
    assert (ran.completed, ran.failed, ran.cut) == (4, 0, 0)


def test_failed_runs_count_for_nothing_and_are_explained_once() -> None:
    result = detailed(
        [0.0, 0.6, 0.0, 0.2], [0, 8, 0, 3], ["Bad Request", "", "Traceback\nBad Request", ""]
    )
    ran = run(**result)

    assert (ran.ttft_new_ms, ran.ttft_seen_ms) == pytest.approx((600, 200))
    assert (ran.completed, ran.failed, ran.cut) == (2, 2, 1)
    assert ran.errors == ["Bad Request"]
    assert ran.notes == ["1 responses have fewer tokens than requested", "Bad Request"]


def test_a_run_reports_its_distance_from_the_ideal() -> None:
    ran = run()

    assert ran.hit_rate == ran.ideal_hit_rate == 0.5
    assert ran.encodes_per_distinct_picture == 1.0
    assert ran.notes == []


def test_repeated_and_foreign_encodes_are_counted() -> None:
    ran = run(Items(hits=1, encoded=2, local=1, encodes=3))

    assert ran.hit_rate == 0.25
    assert ran.encodes_per_distinct_picture == 2.0


@pytest.mark.parametrize(
    ("items", "note"),
    [
        ("it is not an EPD proxy", "it is not an EPD proxy"),
        (Items(9, 9, 0, 9), "it has other clients"),
        (Items(1, 1, 0, 1), "several workers"),
    ],
)
def test_unknown_figures_are_left_out_and_named(items: Items | str, note: str) -> None:
    ran = run(items)

    assert (ran.hit_rate, ran.encodes_per_distinct_picture) == (None, None)
    assert note in ran.notes[0]


def test_a_request_that_failed_may_have_been_counted_or_not() -> None:
    assert run(Items(2, 2, 0, 2), completed=3, failed=1).hit_rate == 0.5
    assert run(Items(1, 2, 0, 2), completed=3, failed=1).hit_rate == pytest.approx(1 / 3)


def test_a_cache_that_was_not_empty_is_reported() -> None:
    ran = run(Items(hits=4, encoded=0, local=0, encodes=0))

    assert ran.hit_rate == 1.0
    assert "another --seed" in ran.notes[0]


def test_the_file_contains_all_results() -> None:
    document = orjson.loads(
        result_document([run()], datetime(2026, 1, 2, tzinfo=UTC), ["bench", "serve"])
    )

    assert document["kind"] == "serve"
    assert document["started_at"] == "2026-01-02T00:00:00+00:00"
    assert document["command"] == ["epd", "bench", "serve"]
    assert document["machine"]["cores"] > 0
    [ran] = document["runs"]
    assert (
        ran
        | {
            "name": "epd",
            "url": "http://h:1",
            "dataset": "local",
            "prompts": 4,
            "distinct_pictures": 2,
            "ttft_ms": {"mean": 2.0, "p50": 1.0, "p99": 3.0},
            "tpot_ms": {"mean": 2.0, "p50": 1.0, "p99": 3.0},
            "hit_rate": 0.5,
            "ideal_hit_rate": 0.5,
            "encodes_per_distinct_picture": 1.0,
            "completed": 4,
            "failed": 0,
        }
        == ran
    )


def test_a_summary_has_the_figures_that_vllm_lacks() -> None:
    assert list(summary(run())) == [
        "epd, local: 2 pictures in 4 requests",
        "  median TTFT: 500 ms with new pictures, 150 ms with pictures that were seen before",
        "  hit rate: 0.500 (ideal: 0.500), encodes per picture: 1.000",
    ]
    assert list(summary(run("it is not an EPD proxy")))[-1].endswith("it is not an EPD proxy")


def test_the_command_line_leaves_nothing_to_chance() -> None:
    words = bench_command(
        TARGET,
        BenchModel("m", "/tokenizer"),
        DATASET,
        {"--request-rate": 2.0, "--max-concurrency": 3},
        Path("/results/one.json"),
    )
    pairs = dict(pairwise(words))

    assert pairs["--base-url"] == "http://h:1"
    assert (pairs["--model"], pairs["--tokenizer"]) == ("m", "/tokenizer")
    assert (pairs["--dataset-path"], pairs["--num-prompts"]) == ("/data", "4")
    assert (pairs["--request-rate"], pairs["--max-concurrency"]) == ("2.0", "3")
    # A test request would use the first picture; another order would be another trace.
    assert pairs["--ready-check-timeout-sec"] == "0"
    assert "--disable-shuffle" in words
    assert "--max-concurrency" not in bench_command(
        TARGET, BenchModel("m", "t"), DATASET, {"--max-concurrency": None}, Path("one.json")
    )
