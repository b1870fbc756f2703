"""Engines that use the memory of the host directly: places in steps, pins, writes and restarts."""

import gc
import importlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ec_store import EntryKey
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.memory import create_memory
from ec_store.arena.protocol import GetStats, Stats, Welcome, encode
from ec_store.arena.store import ArenaStore, HostPlace
from ec_store.arena.url import ArenaOptions
from tests.ec_store.arena.served import MIB, serving
from tests.ec_store.waiting import until

ROWS = 1024
"""Rows of an entry of 1 MiB."""


class Server:
    """Server on a path, which can be stopped and started again.

    Attributes:
        url: URL of the store.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"shm://{path}?verify=1"
        self._path = path
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self._running.enter_context(serving(self._path, 8 * MIB, segment_bytes=4 * MIB))

    def stop(self) -> None:
        self.stats()  # it has begun to listen
        self._running.close()
        gc.collect()  # the server of this process has mapped the memory too, and locked the path

    def stats(self) -> Stats:
        connection = ArenaConnection(str(self._path), "proxy", 10)
        try:
            return connection.call(GetStats())[0]
        finally:
            connection.close()

    @contextmanager
    def store(self) -> Iterator[ArenaStore]:
        with ArenaStore(ArenaOptions(str(self._path), timeout_s=10)) as store:
            yield store

    def put(self, connector: Any, name: str, entry: Any) -> None:
        with self.store() as store:
            assert store.put(EntryKey(connector.namespace, name), entry)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "arena.sock")
    yield server
    server.stop()


class Ranks:
    """Workers of a consumer in this process, each with a connection of its own."""

    def __init__(self, server: Server, count: int, engine: str) -> None:
        host_memory = importlib.import_module("ec_store.engine.host_memory")
        tensors = importlib.import_module("ec_store.engine.tensors")
        backchannel = importlib.import_module("ec_store.engine.backchannel")
        self.loaders = [tensors.Loader(number) for number in range(count)]
        path = ArenaOptions(server.url.removeprefix("shm://").partition("?")[0], timeout_s=10)
        self.stores = [ArenaStore(path, "reader") for _ in self.loaders]
        self.hosts = [
            host_memory.HostMemory(store, loader, backchannel.Sender(engine))
            for store, loader in zip(self.stores, self.loaders, strict=True)
        ]

    def start(self) -> None:
        for one in self.hosts:
            one.start()

    def load(self, vllm: Any, step: Any, number: int) -> Any:
        """Return a rank's encoder cache after the loads of a step, which vLLM sends like this."""
        sent = pickle.loads(pickle.dumps(step))  # noqa: S301
        return vllm.load(self.loaders[number], sent, self.hosts[number])

    def close(self) -> None:
        for one in (*self.hosts, *self.stores):
            one.close()


Start = Callable[[int], tuple[Any, Ranks]]


@pytest.fixture
def start(vllm: Any, server: Server) -> Iterator[Start]:
    """Return a function that starts the scheduler's connector and ranks of a consumer."""
    with ExitStack() as closing:

        def start(count: int) -> tuple[Any, Ranks]:
            with vllm.ranks(count), vllm.role("ec_consumer"):
                connector = vllm.connector({"store": server.url})
            ranks = Ranks(server, count, vllm.engine)
            closing.callback(connector.shutdown)
            closing.callback(ranks.close)
            for number in range(count):
                ranks.load(vllm, empty_step(connector), number)
            until(lambda: all(loader.reader for loader in ranks.loaders))
            ranks.start()
            return connector, ranks

        yield start


def empty_step(connector: Any) -> Any:
    return connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))


def step_that_loads(connector: Any, vllm: Any, name: str, rows: int = ROWS) -> Any:
    """Return the metadata of a step that loads an entry, after its request has ended."""
    request = vllm.request(vllm.feature(name, media=False, tokens=rows))
    request.request_id = name
    until(lambda: connector.ensure_cache_available(request, 0))
    assert connector.take_unavailable_requests() == set()
    connector.update_state_after_alloc(request, 0)
    step = connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[request]))
    connector.request_finished(request)
    return step


def wait_for_places(connector: Any, vllm: Any, server: Server) -> None:
    """Wait until steps refer to the memory of the present server."""
    server.put(connector, "first", vllm.entry(1.0))
    until(
        lambda: isinstance(
            step_that_loads(connector, vllm, "first", 4).loads["first"].raw, HostPlace
        )
    )


def mapped_bytes() -> int:
    """Return the bytes of hosts' memories that this process has mapped, without small pages."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:ec-store" in line:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            sizes.append(end - begin)
    return sum(size for size in sizes if size >= MIB)


def test_a_step_has_the_place_of_an_entry_in_several_extents(
    vllm: Any, server: Server, start: Start
) -> None:
    connector, ranks = start(1)
    wait_for_places(connector, vllm, server)
    entry = vllm.stored(vllm.tensor().new_empty(5 * ROWS // 2, 256).normal_())
    with server.store() as store:
        names = [str(number) for number in range(7)]
        keys = [EntryKey("fill", name) for name in names]
        for key in keys:
            store.put(key, vllm.entry(0.0, ROWS))
        store.lease(keys[::2], 60)
        store.delete(keys[1::2])
    server.put(connector, "divided", entry)
    step = step_that_loads(connector, vllm, "divided", 5 * ROWS // 2)
    loaded = ranks.load(vllm, step, 0)["divided"]

    assert len(step.loads["divided"].raw.extents) > 1
    assert len(pickle.dumps(step)) < 2000
    assert vllm.stored(loaded) == entry


def test_entries_come_by_value_until_all_ranks_have_mapped_the_memory(
    vllm: Any, server: Server, start: Start
) -> None:
    connector, ranks = start(2)
    server.put(connector, "a", vllm.entry(3.0, ROWS))
    ranks.hosts[1].close()
    until(lambda: ranks.loaders[1].reader is not None)
    ranks.loaders[1].reader.has_mapped(None)
    step = step_that_loads(connector, vllm, "a")

    assert not isinstance(step.loads["a"].raw, HostPlace)
    loaded = [ranks.load(vllm, step, number)["a"] for number in range(2)]
    assert [one.equal(vllm.tensor(3.0, ROWS)) for one in loaded] == [True, True]


def test_a_pin_is_held_until_every_rank_has_read_its_step(
    vllm: Any, server: Server, start: Start
) -> None:
    connector, ranks = start(2)
    wait_for_places(connector, vllm, server)
    for number in range(2):
        ranks.load(vllm, empty_step(connector), number)
    until(lambda: server.stats().memory.pinned_bytes == 0)
    server.put(connector, "a", vllm.entry(3.0, ROWS))
    step = step_that_loads(connector, vllm, "a")
    held = [server.stats().memory.pinned_bytes]
    loaded = []
    for number in range(2):
        loaded.append(ranks.load(vllm, step, number)["a"])
        connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
        held.append(server.stats().memory.pinned_bytes)

    assert held[:2] == [MIB, MIB]
    assert [one.equal(vllm.tensor(3.0, ROWS)) for one in loaded] == [True, True]
    until(lambda: server.stats().memory.pinned_bytes == 0)  # without another step


@pytest.mark.fault(96)
def test_a_restarted_server_is_used_again_and_the_old_memory_unmapped(
    vllm: Any, server: Server, start: Start
) -> None:
    connector, ranks = start(2)
    wait_for_places(connector, vllm, server)
    for number in range(2):
        ranks.load(vllm, empty_step(connector), number)
    server.put(connector, "old", vllm.entry(2.0, ROWS))
    step = step_that_loads(connector, vllm, "old")
    server.stop()
    until(lambda: not any(one._told for one in ranks.hosts))  # noqa: SLF001
    threading.Event().wait(0.1)  # twenty turns
    kept = [one._memory is not None for one in ranks.hosts]  # noqa: SLF001
    loaded = [ranks.load(vllm, step, number)["old"] for number in range(2)]
    del step
    until(lambda: mapped_bytes() == 0)

    assert kept == [True, True]  # the step was on its way
    assert [one.equal(vllm.tensor(2.0, ROWS)) for one in loaded] == [True, True]
    server.start()
    server.put(connector, "new", vllm.entry(4.0, ROWS))
    step = step_that_loads(connector, vllm, "new")
    assert ranks.load(vllm, step, 0)["new"].equal(vllm.tensor(4.0, ROWS))
    wait_for_places(connector, vllm, server)


@contextmanager
def pretending(path: Path, *, replies: bool) -> Iterator[None]:
    """Run a server that describes a memory wrongly, or never replies."""
    memory = create_memory(MIB)
    ended = threading.Event()

    def serve() -> None:
        connections = []
        while not ended.is_set():
            with suppress(TimeoutError):
                connections.append(listener.accept()[0])
                if replies:
                    welcome = encode(Welcome(b"memory", 1, MIB, 0))
                    socket.send_fds(connections[-1], [welcome], [memory.fd])
        for connection in connections:
            connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0.01)
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        ended.set()
        thread.join()
    path.unlink()
    os.close(memory.fd)


@pytest.mark.fault(96)
@pytest.mark.parametrize("replies", [False, True], ids=["hangs", "lies"])
def test_a_server_that_hangs_or_lies_costs_a_miss_and_the_next_one_is_used(
    vllm: Any, server: Server, start: Start, caplog: pytest.LogCaptureFixture, replies: bool
) -> None:
    server.stop()
    path = Path(server.url.removeprefix("shm://").partition("?")[0])
    path.unlink(missing_ok=True)
    url, server.url = server.url, f"{server.url}&timeout=50ms"
    with pretending(path, replies=replies):
        connector, ranks = start(1)
        request = vllm.request(vllm.feature("a"))
        until(lambda: connector.ensure_cache_available(request, 0))
        connector.request_finished(request)
        figures = connector.get_ec_connector_stats().data
        assert (figures.get("hits", 0), figures["errors"]) == (0, 1)
        assert figures["host_mapped_bytes"] == 0
        until(lambda: ("describes no memory" if replies else "timed out") in caplog.text)
    server.url = url
    server.start()
    wait_for_places(connector, vllm, server)

    server.put(connector, "b", vllm.entry(3.0, ROWS))
    step = step_that_loads(connector, vllm, "b")
    assert ranks.load(vllm, step, 0)["b"].equal(vllm.tensor(3.0, ROWS))


class Device:
    """Fake device that registers memory segment by segment, as often as it is let.

    Attributes:
        registered: ranges of addresses.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host_memory = importlib.import_module("ec_store.engine.host_memory")
        torch = importlib.import_module("torch")
        self.registered: list[range] = []
        self.allowed = threading.Semaphore(0)
        self.fake = importlib.import_module("tests.fake_accelerator").FakeAccelerator(monkeypatch)
        self.fake.move_here()
        monkeypatch.setattr(host_memory, "register", self._register)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda one: self.has(one.data_ptr()))

    def has(self, address: int) -> bool:
        return any(address in one for one in self.registered)

    def _register(self, memory: Any, begin: int, end: int) -> bool:
        self.allowed.acquire()
        start = memory.ctypes.data
        self.registered.append(range(start + begin, start + end))
        return True


@pytest.fixture
def device(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    del vllm  # requested first: it skips without vLLM
    device = Device(monkeypatch)
    yield device
    device.allowed.release(100)


def test_metrics_sum_what_the_processes_of_an_engine_hold(
    vllm: Any, server: Server, start: Start, device: Device
) -> None:
    connector, _ = start(1)
    wait_for_places(connector, vllm, server)
    figures: dict[str, float] = {}

    def has_reported() -> bool:
        stats = connector.get_ec_connector_stats()
        figures.update(stats.data if stats else {})
        return figures["host_registered_bytes"] == 8 * MIB

    device.allowed.release(2)
    until(has_reported)
    assert figures["host_connections"] == 2  # of the scheduler and of the rank
    assert figures["host_mapped_bytes"] == 16 * MIB


def test_a_device_copies_from_the_place_where_it_is_registered_and_else_through_pinned_memory(
    vllm: Any, server: Server, start: Start, device: Device
) -> None:
    """The entry of 6 MiB lies on both sides of the border between two segments of 4 MiB."""
    connector, ranks = start(1)
    wait_for_places(connector, vllm, server)
    entry = vllm.stored(vllm.tensor().new_empty(6 * ROWS, 256).normal_())
    server.put(connector, "a", entry)
    direct: list[list[bool]] = []
    values: list[Any] = []
    for allowed in range(3):
        until(lambda allowed=allowed: len(device.registered) == allowed)  # type: ignore[misc]
        step = step_that_loads(connector, vllm, "a", 6 * ROWS)
        device.fake.copied.clear()
        loaded = ranks.load(vllm, step, 0)["a"]
        memory = ranks.hosts[0]._memory  # noqa: SLF001
        begin = memory.ctypes.data
        copied = [one.data_ptr() for one in device.fake.copied]
        direct.append([begin <= address < begin + len(memory) for address in copied])
        device.fake.read([loaded], values)
        device.fake.finish()
        ranks.loaders[0].report_copies()
        until(lambda: server.stats().memory.pinned_bytes < MIB)
        device.allowed.release()

    assert [sorted(one) for one in direct] == [[False] * 2, [False, True], [True] * 2]
    assert [vllm.stored(one) == entry for one in values] == [True] * 3


def test_a_pin_is_held_until_the_device_has_copied_the_entry(
    vllm: Any, server: Server, start: Start, device: Device
) -> None:
    device.allowed.release(2)
    connector, ranks = start(1)
    wait_for_places(connector, vllm, server)
    ranks.load(vllm, empty_step(connector), 0)
    device.fake.finish()
    until(lambda: server.stats().memory.pinned_bytes == 0)
    server.put(connector, "a", vllm.entry(3.0, ROWS))
    step = step_that_loads(connector, vllm, "a")
    ranks.load(vllm, step, 0)
    ranks.load(vllm, empty_step(connector), 0)
    before = server.stats().memory.pinned_bytes
    device.fake.finish()

    assert before == MIB
    until(lambda: server.stats().memory.pinned_bytes == 0)


class Producing:
    """Worker of a producer, with the scheduler of its engine."""

    def __init__(self, vllm: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        with vllm.role("ec_producer"):
            self.scheduler = vllm.connector({"store": server.url})
            self.worker = vllm.worker(monkeypatch)
        self._vllm = vllm
        self._closed = False

    def save(self, *tensors: Any) -> None:
        """Save tensors as items "0", "1" and so on."""
        cache = {str(number): tensor for number, tensor in enumerate(tensors)}
        request = self._vllm.request(
            *(self._vllm.feature(name, offset=10 * n) for n, name in enumerate(cache))
        )
        step = SimpleNamespace(scheduled_new_reqs=[request])
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step))
        self.worker.start_save_caches(encoder_cache={})
        for name in cache:
            self.worker.save_caches(cache, name)
        self.worker.build_connector_worker_meta()

    def close(self) -> dict[str, Any]:
        """Wait for the writes, and return the engine's figures."""
        figures: dict[str, Any] = {}
        if not self._closed:
            self._closed = True
            self.worker.shutdown()
            figures = self.scheduler.get_ec_connector_stats().data
            self.scheduler.shutdown()
        return figures

    def key(self, name: str) -> EntryKey:
        return EntryKey(self.worker.namespace, name)


@pytest.fixture
def producing(
    vllm: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Producing]]:
    with ExitStack() as closing:

        def make() -> Producing:
            made = Producing(vllm, server, monkeypatch)
            closing.callback(made.close)
            return made

        yield make


def test_an_output_is_stored_when_its_copy_has_ended(
    vllm: Any, server: Server, device: Device, producing: Callable[[], Producing]
) -> None:
    device.allowed.release(2)
    producer = producing()
    outputs = [device.fake.tensor(vllm.tensor(fill, ROWS)) for fill in (1.0, 2.0)]
    producer.save(*outputs)
    del outputs
    figures = producer.close()
    with server.store() as store:
        found = [store.get(producer.key(name)) for name in "01"]

    assert found == [vllm.entry(1.0, ROWS), vllm.entry(2.0, ROWS)]
    assert (figures["saves"], figures["save_bytes"]) == (2, 2 * MIB)
    assert device.fake.log[:2] == ["wait", "synchronize"]
    assert device.fake.contexts == {1}
    assert producer.worker._saver._copies._ring is None  # noqa: SLF001


def test_an_output_that_is_not_finite_leaves_nothing(
    vllm: Any, server: Server, producing: Callable[[], Producing]
) -> None:
    producer = producing()
    producer.save(vllm.tensor(float("nan"), ROWS), vllm.tensor(2.0, ROWS))
    figures = producer.close()

    assert (figures["saves"], figures["drops"], figures["nonfinite"]) == (1, 1, 1)
    found = server.stats()
    assert (found.entries, found.taken_bytes, found.memory.begun_bytes) == (1, MIB, 0)


@pytest.mark.fault(101)
@pytest.mark.parametrize("settles", [True, False], ids=["device settles", "device hangs"])
def test_the_place_of_a_failed_copy_is_free_once_no_device_can_write_to_it(
    server: Server,
    device: Device,
    producing: Callable[[], Producing],
    monkeypatch: pytest.MonkeyPatch,
    settles: bool,
) -> None:
    torch = importlib.import_module("torch")
    tensors = importlib.import_module("ec_store.engine.tensors")
    streams = importlib.import_module("tests.fake_accelerator").FakeStream

    def fail(*_: object) -> None:
        raise RuntimeError("device")

    producer = producing()
    with monkeypatch.context() as patch:
        patch.setattr(tensors.Output, "copy_to", fail)
        if not settles:
            patch.setattr(streams, "synchronize", fail)
        producer.save(device.fake.tensor(torch.ones(ROWS, 256)))
        until(lambda: not producer.worker._saver._writer.waiting_bytes)  # noqa: SLF001
    begun = server.stats().memory.begun_bytes
    figures = producer.close()

    assert begun == (0 if settles else MIB)
    assert (figures["drops"], figures["exceptions"]) == (1, 1)
    assert server.stats().entries == 0


@pytest.mark.fault(97)
@pytest.mark.parametrize("state", ["down", "full"])
def test_an_output_is_dropped_without_a_server_or_room_and_a_later_one_is_stored(
    vllm: Any, server: Server, producing: Callable[[], Producing], state: str
) -> None:
    producer = producing()
    with ExitStack() as kept:
        if state == "down":
            server.stop()
        else:
            store = kept.enter_context(server.store())
            keys = [EntryKey("fill", str(number)) for number in range(8)]
            for key in keys:
                store.put(key, vllm.entry(0.0, ROWS))
            store.lease(keys, 60)
        producer.save(vllm.tensor(1.0, ROWS))
        until(lambda: not producer.worker._saver._writer.waiting_bytes)  # noqa: SLF001
        if state == "full":
            store.delete(keys)
    if state == "down":
        server.start()
    producer.save(vllm.tensor(2.0, ROWS))
    figures = producer.close()

    assert (figures["drops"], figures["saves"]) == (1, 1)
    with server.store() as store:
        assert store.get(producer.key("0")) == vllm.entry(2.0, ROWS)
