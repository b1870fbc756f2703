"""Service, asyncio calls and command line, with a real store."""

import asyncio
import json
import os
import re
import shutil
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from ec_store import EntryKey, StoreUnavailable, open_store, service
from ec_store import entry as entry_module
from ec_store.__main__ import main
from ec_store.aio import CLOSE_S, AsyncStore
from ec_store.concurrency import DaemonPool
from ec_store.disk.config import DiskConfig
from ec_store.disk.store import SharedDiskStore
from ec_store.errors import StoreMissing
from ec_store.opening import open_async_store
from ec_store.service import create_app
from tests.deploy.expressions import asked, queries
from tests.deploy.tools import DASHBOARD, rules
from tests.ec_store.arena.served import serving
from tests.ec_store.entries import entry, unchecked
from tests.paths import ROOT

KEY = EntryKey("ns", "k")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?max_bytes=1MiB"


async def test_async_store_has_the_calls_of_the_store(url: str) -> None:
    async with await open_async_store(url) as store:
        assert await store.put(KEY, entry())
        assert not await store.put(KEY, entry())
        assert await store.get(KEY) == entry()
        [info], [leased] = await store.lookup([KEY]), await store.lease([KEY], 10)
        assert info == leased
        assert info is not None
        assert info.shape == (3, 4)
        assert await store.claim([KEY], "a", 10) == [True]
        assert await store.claim([KEY], "b", 10) == [False]
        await store.release([KEY], "a")
        assert await store.claim([KEY], "b", 10) == [True]
        await store.register_namespace("m", "ns")
        assert await store.namespaces() == {"m": "ns"}
        assert (await store.stats()).puts == 1
        assert await store.delete([KEY]) == 1


async def test_a_store_is_closed_while_every_thread_hangs(url: str) -> None:
    store, pool, go = open_store(url), DaemonPool(1, "test"), threading.Event()
    hanging = pool.submit(go.wait)
    try:
        await asyncio.wait_for(AsyncStore(store, pool).close(), CLOSE_S / 2)
        with pytest.raises(StoreUnavailable, match="closed"):
            store.get(KEY)
    finally:
        go.set()
        hanging.result(60)


async def test_a_missing_store_without_create_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with pytest.raises(StoreMissing, match=f"there is no store in {root}"):
        await open_async_store(root.as_uri(), create=False)
    assert not root.exists()

    with open_store(root.as_uri()):
        pass
    config = DiskConfig.from_url(root.as_uri())
    async with AsyncStore(SharedDiskStore(config, create=False, look_every_s=0)) as store:
        shutil.rmtree(root)
        with pytest.raises(StoreMissing, match=f"there is no store in {root}"):
            await store.claim([KEY], "a", 10)
        assert await store.lookup([KEY]) == [None]
        assert not root.exists()

        with open_store(root.as_uri()) as made:
            made.put(KEY, entry())
        assert await store.get(KEY) == entry()


async def test_calls_leave_the_event_loop_free(url: str) -> None:
    async with await open_async_store(url) as store:
        large = entry(shape=(1000, 200))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(tick())
        for number in range(3):
            await store.put(EntryKey("ns", str(number)), large)
        task.cancel()

        assert ticks > 3


@pytest.fixture
async def client(url: str) -> AsyncIterator[TestClient[Any, Any]]:
    app = create_app(AsyncStore(open_store(url)), interval_s=0.05, api_key="key")
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer key"}) as made:
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
    client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    go = threading.Event()

    def sweep(*_: object) -> int:
        if how == "hangs":
            go.wait(60)
        raise StoreUnavailable("its file system fails")

    monkeypatch.setattr(service, "LONGEST_S", 0.5)
    await until_age(client, lambda age_s: age_s is not None)
    with monkeypatch.context() as patch:
        patch.setattr(SharedDiskStore, "sweep", sweep)
        assert (await until_health(client, 503))["status"] == "late"
    go.set()
    assert (await until_health(client, 200))["status"] == "healthy"


@pytest.mark.parametrize(
    ("bound", "warned"),
    [
        (("127.0.0.1", ""), False),
        (("localhost", ""), False),
        (("::1", ""), False),
        (("0.0.0.0", ""), True),  # noqa: S104 - it is not bound
        (("store.example", ""), True),
        (("0.0.0.0", "secret"), False),  # noqa: S104 - it is not bound
    ],
)
def test_serve_warns_of_an_open_address_without_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound: tuple[str, str],
    warned: bool,
) -> None:
    host, key = bound
    monkeypatch.setattr(web, "run_app", lambda *_, **__: None)
    monkeypatch.setenv("EC_STORE_API_KEY", key)
    with pytest.raises(SystemExit):
        main(["serve", f"file://{tmp_path}/store", "--host", host])

    assert ("EC_STORE_API_KEY" in capsys.readouterr().err) is warned


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


async def test_dashboard_and_rules_ask_for_metrics_that_the_service_has(
    client: TestClient[Any, Any], memory: TestClient[Any, Any]
) -> None:
    async with client.get("/metrics") as reply, memory.get("/metrics") as of_memory:
        page = await reply.text() + await of_memory.text()
    has = {re.split(r"[ {]", line)[0] for line in page.splitlines() if line[0] != "#"}
    expressions = [
        *(rule["expr"] for rule in rules()),
        *queries(json.loads(DASHBOARD.read_text())),
    ]
    wanted = {
        name for expr in expressions for name, _ in asked(expr) if name.startswith("ec_store_")
    }

    assert "ec_store_maintenance_last_success_timestamp_seconds" in wanted
    assert wanted - has == set()


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


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    return ended.value.code, capsys.readouterr().out


def test_the_command_line(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url) as store:
        store.put(KEY, entry())
        store.put(EntryKey("other", "k"), entry())
        store.register_namespace("m", "ns")

    code, out = run(capsys, "stat", url, "--json")
    stat = json.loads(out)
    assert (code, stat["entries"], stat["namespaces"]) == (0, 2, {"m": "ns"})
    code, out = run(capsys, "stat", url)
    assert "1.0 MiB" in out
    assert "m: ns" in out
    code, out = run(capsys, "ls", url)
    assert out.count("3x4") == 2
    code, out = run(capsys, "ls", url, "--json")
    assert {json.loads(line)["namespace"] for line in out.splitlines()} == {"ns", "other"}
    code, out = run(capsys, "purge", url, "--namespace", "other")
    assert "1 entries of other removed" in out
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "1 entries read, 0 corrupt\n")
    code, out = run(capsys, "gc", url, "--json")
    assert json.loads(out) == {"removed": 0}


def test_verify_names_the_corrupt_ones_and_fixes_them(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(url) as store:
        store.put(KEY, entry())
    [path] = [path for path in tmp_path.rglob(f"{KEY.digest}*") if path.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    code, out = run(capsys, "verify", url)
    assert code == 1
    assert "CORRUPT" in out
    code, _ = run(capsys, "verify", url, "--fix")
    assert code == 0
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "0 entries read, 0 corrupt\n")


@pytest.mark.fault(20)
def test_verify_survives_malformed_entries(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url) as store:
        store.put(KEY, unchecked(entry(), shape=(-3, -4)))
        store.put(EntryKey("ns", "floats"), unchecked(entry(), shape=(3.0, 4.0)))
        store.put(EntryKey("ns", "good"), entry())

    code, out = run(capsys, "verify", url)
    assert code == 1
    assert out.count("CORRUPT") == 2
    code, out = run(capsys, "verify", url, "--fix")
    assert (code, "2 corrupt, deleted" in out) == (0, True)
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "1 entries read, 0 corrupt\n")


@pytest.mark.fault(93)
def test_verify_keeps_entries_of_another_format(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store, monkeypatch.context() as later:
        later.setattr(entry_module, "FORMAT", "ec_store/2")
        store.put(KEY, entry())

    code, out = run(capsys, "verify", url, "--fix")
    assert code == 0
    assert "SKIPPED: its format is ec_store/2" in out
    assert "1 entries read, 0 corrupt, 1 of other formats, not checked and kept" in out
    code, out = run(capsys, "verify", url, "--json")
    assert json.loads(out.splitlines()[-1]) == {
        "checked": 1,
        "corrupt": 0,
        "fixed": 0,
        "skipped": 1,
    }


@pytest.mark.parametrize("wrong", ["ftp://x", "file:///tmp/x?bogus=1", "file:///tmp/x?ttl=soon"])
def test_an_invalid_url_is_reported_in_one_line(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["stat", wrong])

    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
