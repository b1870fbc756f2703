"""The server of the host's memory on an engine's `/metrics`, as the proxy reads it."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from epd.routing.reports import Host, read_host
from tests.ec_store.arena.served import serving
from tests.ec_store.waiting import until

ADDRESS = "shm+tls://host-a:8101"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.sock"


@pytest.fixture
def url(path: Path) -> str:
    return f"shm://{path}"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prom(vllm: Any, url: str, registry: CollectorRegistry) -> Any:
    """Make the metrics of two engines."""
    metrics = import_module("ec_store.vllm_connector.metrics")
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    config = vllm.transferring("ECStoreConnector", "ec_both", store=url)
    return metrics.StorePromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})


def shown(registry: CollectorRegistry) -> Host | None:
    return read_host(b"\n" + generate_latest(registry))


def test_the_server_is_named_before_the_first_step(
    vllm: Any, url: str, path: Path, registry: CollectorRegistry
) -> None:
    with serving(path, address=ADDRESS, tier_name="cafe") as server:
        prom(vllm, url, registry)

    assert shown(registry) == Host(ADDRESS, server.name.hex(), "cafe")


@pytest.mark.parametrize("has_server", [False, True], ids=["no server", "without --listen"])
def test_a_server_without_an_address_is_not_named(
    vllm: Any, url: str, path: Path, registry: CollectorRegistry, has_server: bool
) -> None:
    if has_server:
        with serving(path):
            prom(vllm, url, registry)
    else:
        prom(vllm, url, registry)

    assert shown(registry) is None


def is_shown(registry: CollectorRegistry, host: Host) -> bool:
    return shown(registry) == host


@pytest.mark.fault(154)
def test_an_engine_without_steps_names_a_server_that_starts_later_and_again(
    vllm: Any, url: str, path: Path, registry: CollectorRegistry
) -> None:
    prom(vllm, url, registry)
    names = []
    for _ in range(2):
        with serving(path, address=ADDRESS) as server:
            expected = Host(ADDRESS, server.name.hex())
            until(partial(is_shown, registry, expected))
            names.append(server.name)

    assert names[0] != names[1]
