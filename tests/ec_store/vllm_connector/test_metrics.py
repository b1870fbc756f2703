"""Metrics of the connector, as vLLM aggregates them and shows them on `/metrics`."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from epd.routing.reports import writes_outputs
from epd.tools.doctor.facts import Preparation
from epd.tools.doctor.instances import read_preparation
from tests.deploy.expressions import asked, queries
from tests.deploy.tools import DASHBOARD, rules
from tests.ec_store.vllm_connector.steps import Connect, put, settle

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration" / "store.md"


@pytest.fixture
def metrics(vllm: Any) -> Any:
    return import_module("ec_store.vllm_connector.metrics")


@pytest.fixture
def prom(metrics: Any, vllm: Any) -> Any:
    """Register the metrics for two engines."""
    before = set(REGISTRY._collector_to_names)  # noqa: SLF001
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    yield metrics.StorePromMetrics(
        vllm.transferring("ECStoreConnector", "ec_both", store="file:///store"),
        kinds,
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    for collector in set(REGISTRY._collector_to_names) - before:  # noqa: SLF001
        REGISTRY.unregister(collector)


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    sample = {"engine": str(engine), **labels}
    return REGISTRY.get_sample_value(f"vllm:ec_store_{name}", sample)


def test_counts_add_up_gauges_are_the_latest_and_histograms_observe(prom: Any) -> None:
    prom.observe({"hits": 2, "held_bytes": 7, "fetch_seconds": [0.02, 0.3], "unknown": 1})
    prom.observe({"hits": 3, "held_bytes": 5, "fetch_seconds": [2.0]}, 0)
    prom.observe({"held_bytes": 9}, 1)

    assert value("hits_total") == 5
    assert (value("held_bytes"), value("held_bytes", 1)) == (5, 9)
    assert value("fetch_seconds_count") == 3
    assert value("fetch_seconds_sum") == pytest.approx(2.32)
    assert value("fetch_seconds_bucket", le="0.025") == 1


@pytest.mark.parametrize("name", ["save_seconds", "eviction_seconds"])
def test_time_of_writes_and_of_evictions_are_histograms(prom: Any, name: str) -> None:
    prom.observe({name: [0.02, 0.3]})

    assert value(f"{name}_sum") == pytest.approx(0.32)
    assert (value(f"{name}_count"), value(f"{name}_bucket", le="0.025")) == (2, 1)
    assert value(f"{name}_total") is None


def test_dashboard_and_rules_ask_for_metrics_that_the_connector_has(vllm: Any) -> None:
    page = vllm.page().decode()
    has = {line.split("{")[0] for line in page.splitlines() if not line.startswith("#")}
    expressions = [*(rule["expr"] for rule in rules()), *queries(json.loads(DASHBOARD.read_text()))]
    wanted = {
        name for expr in expressions for name, _ in asked(expr) if name.startswith("vllm:ec_store_")
    }

    assert {"vllm:ec_store_save_seconds_bucket", "vllm:ec_store_breaker_open"} <= wanted
    assert wanted - has == set()


def test_every_metric_is_documented(prom: Any) -> None:
    names = {
        line.split()[2].removeprefix("vllm:ec_store_")
        for line in generate_latest().decode().splitlines()
        if line.startswith("# TYPE vllm:ec_store_") and not line.split()[2].endswith("_created")
    }
    document = DOCUMENT.read_text()

    assert {"hits_total", "held_bytes", "fetch_wait_seconds"} <= names
    assert [name for name in names if f"`{name}`" not in document] == []


def test_the_doctor_reads_how_an_engine_prepares_media(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm.transferring("ECStoreConnector", "ec_producer", store="file:///store")
    settings = config.model_config.multimodal_config
    pages = [vllm.page()]
    monkeypatch.setattr(config.parallel_config, "_api_process_count", 3)
    monkeypatch.setattr(settings, "mm_processor_kwargs", {"device": "cuda:0"})
    monkeypatch.setattr(settings, "media_io_kwargs", {"image": {}, "video": {"num_frames": 3}})
    pages.append(vllm.page())

    assert [read_preparation(page) for page in pages] == [
        Preparation(1, "cpu", "cpu", ()),
        Preparation(3, "cuda", "cpu", ("video",)),
    ]


def test_interval_has_sums_latest_gauges_and_means(metrics: Any) -> None:
    first = metrics.StoreConnectorStats({"hits": 1, "held_bytes": 7, "fetch_seconds": [1.0]})
    second = metrics.StoreConnectorStats(
        {"hits": 2, "misses": 1, "held_bytes": 3, "fetch_seconds": [3.0]}
    )
    whole = first.aggregate(second)

    assert whole.reduce() == {"hits": 3, "misses": 1, "held_bytes": 3, "fetch_seconds": 2.0}
    assert first.data["fetch_seconds"] == [1.0]
    assert second.aggregate(metrics.StoreConnectorStats({"hits": 1})).data["held_bytes"] == 3


@pytest.mark.fault(70)
def test_namespace_of_the_scheduler_is_published_and_a_disagreement_is_one_error(
    prom: Any, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = vllm.namespace()
    for namespace in (own, "other", "other"):
        prom.observe({"namespace": namespace, "hits": 1}, 1)
    published = [(value("namespace_info", 1, namespace=one)) for one in (own, "other")]
    [record] = [one for one in caplog.records if "two namespaces" in one.getMessage()]

    assert published == [0, 1]
    assert value("namespace_info", 0, namespace=own) == 1
    assert value("namespace_info", 0, namespace="other") is None
    assert value("hits_total", 1) == 3
    assert record.levelname == "ERROR"
    assert own in record.getMessage()
    assert "other" in record.getMessage()


@pytest.mark.parametrize(
    ("role", "writes"), [("ec_producer", True), ("ec_both", True), ("ec_consumer", False)]
)
def test_metrics_show_whether_the_engine_writes(
    metrics: Any, vllm: Any, role: str, writes: bool
) -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    config = vllm.transferring("ECStoreConnector", role, store="file:///store")
    metrics.StorePromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

    assert writes_outputs(b"\n" + generate_latest(registry)) is writes


def test_scheduler_reports_its_namespace_beside_its_metrics(
    vllm: Any, connect: Connect, metrics: Any
) -> None:
    connector = connect()
    told = connector.get_ec_connector_stats()
    both = metrics.StoreConnectorStats({"hits": 1, "namespace": "ns"}).aggregate(told)

    assert told.data["namespace"] == connector.namespace
    assert both.data["namespace"] == connector.namespace
    assert "namespace" not in both.reduce()
    assert connector.get_ec_connector_stats() is None


def test_scheduler_reports_gauges_only_after_changes(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    request = vllm.request(vllm.feature("a"))
    settle(connector, request)
    told = connector.get_ec_connector_stats().data

    assert told["pinned_bytes"] == told["held_bytes"] > vllm.entry().data.nbytes
    assert (told["queue_depth"], told["queued_bytes"], told["inflight_bytes"]) == (0, 0, 0)
    assert told["breaker_open"] == 0
    assert len(told["fetch_wait_seconds"]) == len(told["fetch_seconds"]) == 1
    assert json.loads(json.dumps(told)) == told
    assert connector.get_ec_connector_stats() is None
    connector.request_finished(request)
    assert connector.get_ec_connector_stats().data["pinned_bytes"] == 0
