"""Service, asyncio calls and command line, with a real store."""

import asyncio
import os
import re
import shutil
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ec_store import EntryKey, StoreUnavailable, open_store
from ec_store.aio import AsyncStore
from ec_store.disk.store import SharedDiskStore
from ec_store.service import create_app
from tests.ec_store.arena.served import serving
from tests.ec_store.entries import entry
from tests.paths import ROOT

KEY = EntryKey("ns", "k")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?max_bytes=1MiB"


@asynccontextmanager
async def client_of(url: str, **limits: float) -> AsyncIterator[TestClient[Any, Any]]:
    app = create_app(AsyncStore(open_store(url)), interval_s=0.05, api_key="key", **limits)
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer key"}) as made:
        yield made


@pytest.fixture
async def client(url: str) -> AsyncIterator[TestClient[Any, Any]]:
    async with client_of(url) as made:
        yield made


async def test_service_needs_the_key_for_all_routes_but_health(
    client: TestClient[Any, Any],
) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    statuses = {}
    for path in ("/health", "/metrics", "/nothing"):
        async with client.get(path, headers=wrong) as reply:
            statuses[path] = reply.status

    assert statuses == {"/health": 200, "/metrics": 401, "/nothing": 401}


async def test_a_key_of_any_bytes_is_refused(client: TestClient[Any, Any]) -> None:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
    status = await reader.readline()
    writer.close()

    assert status == b"HTTP/1.1 401 Unauthorized\r\n"


@pytest.fixture
async def memory() -> AsyncIterator[TestClient[Any, Any]]:
    """Return a client of the service of a host's memory, in which one process holds two entries."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "s", 8 * 2**20):
        url = f"shm://{folder}/s"
        with open_store(url) as store:
            store.put(KEY, entry(shape=(2**11, 2**10)))
            store.put(EntryKey("ns", "leased"), entry())
            store.lease([EntryKey("ns", "leased")], 60)
            held = store.get(KEY)
            with pytest.raises(StoreUnavailable, match="full"):
                store.put(EntryKey("ns", "large"), entry(shape=(2**11, 2**10)))
            app = create_app(AsyncStore(open_store(url)), interval_s=10)
            async with TestClient(TestServer(app)) as made:
                yield made
            del held


async def test_figures_of_a_memory_over_http(memory: TestClient[Any, Any]) -> None:
    async with memory.get("/metrics") as reply:
        page = await reply.text()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")

    pid, pinned = os.getpid(), 4 * 2**20
    assert float(values[f'ec_store_client_pinned_bytes{{pid="{pid}",role="writer"}}']) == pinned
    assert float(values["ec_store_pinned_bytes"]) == pinned
    assert float(values["ec_store_leased_bytes"]) == 4096
    assert float(values["ec_store_max_bytes"]) == 2 * pinned
    assert float(values["ec_store_refused_writes_total"]) == 1
    assert float(values["ec_store_gone_bytes"]) == 0
    assert float(values["ec_store_saved_encode_seconds_total"]) == 0
    assert float(values["ec_store_clients"]) >= 2
    assert float(values["ec_store_oldest_pin_seconds"]) > 0
    assert [values[name] for name in values if name.startswith("ec_store_memory_info{pages=")] == [
        "1.0"
    ]
    assert float(values["process_max_fds"]) >= float(values["process_open_fds"]) > 0


async def until_age(client: TestClient[Any, Any], right: Callable[[float | None], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            async with client.get("/health") as reply:
                if right((await reply.json())["maintenance_age_s"]):
                    return
            await asyncio.sleep(0.01)


async def test_health_reports_the_last_maintenance_and_failures_are_counted(
    client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise struct.error("of no contract")

    await until_age(client, lambda age_s: age_s is not None)
    monkeypatch.setattr(SharedDiskStore, "sweep", fail)
    await until_age(client, lambda age_s: age_s is not None and age_s > 0.4)
    monkeypatch.undo()
    await until_age(client, lambda age_s: age_s is not None and age_s < 0.4)
    async with client.get("/metrics") as reply:
        metrics = await reply.text()
    [failures] = re.findall(r"^ec_store_maintenance_failures_total (\S+)", metrics, re.MULTILINE)

    assert float(failures) > 1
    assert "ec_store_maintenance_seconds_bucket" in metrics
    assert "ec_store_maintenance_last_success_timestamp_seconds 1." in metrics
    logged = [one for one in caplog.records if "maintenance" in one.message]
    assert len(logged) == 1


async def until_health(client: TestClient[Any, Any], status: int) -> Any:
    async with asyncio.timeout(60):
        while True:
            async with client.get("/health") as reply:
                if reply.status == status:
                    return await reply.json()
            await asyncio.sleep(0.01)


@pytest.mark.fault(90)
async def test_metrics_show_failing_maintenance_while_the_store_cannot_be_read(
    client: TestClient[Any, Any], tmp_path: Path
) -> None:
    await until_health(client, 200)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no directory")
    await until_health(client, 503)

    async with client.get("/metrics") as reply:
        page = await reply.text()
    failures = re.search(r"^ec_store_maintenance_failures_total ([\d.]+)$", page, re.MULTILINE)
    assert reply.status == 200
    assert failures is not None
    assert float(failures[1]) > 0
    assert "ec_store_entries" not in page


@pytest.mark.fault(90)
async def test_health_fails_after_its_directory_was_removed(
    client: TestClient[Any, Any], tmp_path: Path
) -> None:
    await until_age(client, lambda age_s: age_s is not None)
    await until_health(client, 200)
    shutil.rmtree(tmp_path / "store")

    assert (await until_health(client, 503))["status"] == "late"


@pytest.mark.fault(90)
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_health_fails_while_maintenance_fails_or_hangs(
    url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    go = threading.Event()

    def sweep(*_: object) -> int:
        if how == "hangs":
            go.wait(60)
        raise StoreUnavailable("its file system fails")

    async with client_of(url, longest_s=0.5) as client:
        await until_age(client, lambda age_s: age_s is not None)
        with monkeypatch.context() as patch:
            patch.setattr(SharedDiskStore, "sweep", sweep)
            assert (await until_health(client, 503))["status"] == "late"
        go.set()
        assert (await until_health(client, 200))["status"] == "healthy"


async def test_figures_over_http(client: TestClient[Any, Any], url: str) -> None:
    with open_store(url) as store:
        store.put(KEY, entry())
        store.lease([KEY], 60)
    async with client.get("/metrics") as reply:
        metrics = await reply.text()

    assert "ec_store_entries 1.0" in metrics
    assert "ec_store_max_bytes 1.048576e+06" in metrics
    assert "ec_store_leased 1.0" in metrics


async def test_the_service_keeps_the_quota(url: str, tmp_path: Path) -> None:
    with SharedDiskStore.from_url(url.replace("1MiB", "1GiB")) as store:
        for number in range(20):
            store.put(EntryKey("ns", str(number)), entry(shape=(1000, 50)))
        assert (store.stats().bytes or 0) > 2**20
        store.configure(max_bytes=2**20)
    app = create_app(AsyncStore(open_store(url)), interval_s=0.05)
    async with TestClient(TestServer(app)) as made:
        async with asyncio.timeout(60):
            while True:
                evictions = await count_of(made, "ec_store_eviction_seconds")
                if evictions:
                    break
                await asyncio.sleep(0.05)
        looks = await count_of(made, "ec_store_maintenance_seconds")
    with SharedDiskStore.from_url(url) as store:
        left = store.stats().bytes or 0

    assert evictions <= looks
    assert 0 < left <= 2**20


async def count_of(client: TestClient[Any, Any], histogram: str) -> float:
    """Return the number of observations."""
    async with client.get("/metrics") as reply:
        metrics = await reply.text()
    [count] = re.findall(rf"^{histogram}_count (\S+)", metrics, re.MULTILINE)
    return float(count)


async def test_every_metric_of_the_service_is_documented(
    client: TestClient[Any, Any], memory: TestClient[Any, Any]
) -> None:
    async with client.get("/metrics") as reply, memory.get("/metrics") as of_memory:
        page = await reply.text() + await of_memory.text()
    document = (ROOT / "docs" / "configuration" / "store.md").read_text()
    names = re.findall(r"^# TYPE (ec_store_\w+)", page, re.MULTILINE)
    metrics = [name for name in names if not name.endswith("_created")]

    assert {"ec_store_entries", "ec_store_eviction_seconds"} <= set(metrics)
    assert [name for name in metrics if f"`{name}`" not in document] == []
