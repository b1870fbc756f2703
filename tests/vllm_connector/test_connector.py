"""The connector's promises to the engine, call by call."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryInfo, EntryKey, StoreUnavailable, open_store
from ec_store.backchannel import Receiver, Sender
from tests.vllm_connector.conftest import Connect


def put(connector: Any, url: str, identifier: str, entry: Entry) -> None:
    with open_store(url) as store:
        assert store.put(EntryKey(connector.namespace, identifier), entry)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settle(connector: Any, request: Any) -> set[str]:
    """Ask until the request may be scheduled, or is to fail; the requests that are to fail."""
    failed: set[str] = set()

    def settled() -> bool:
        failed.update(connector.take_unavailable_requests())
        return bool(failed) or connector.ensure_cache_available(request, 0)

    until(settled)
    return failed


def counted(connector: Any) -> dict[str, float]:
    stats = connector.get_ec_connector_stats()
    return dict(stats.data) if stats else {}


class Step:
    """What vLLM's scheduler says of a step."""

    def __init__(self, *requests: Any) -> None:
        self.scheduled_new_reqs = requests


def test_an_entry_is_here_before_its_request_is_scheduled_and_stays(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry(3.0))
    request = vllm.request(vllm.feature("a", media=False))

    assert not connector.ensure_cache_available(request, 0)
    assert settle(connector, request) == set()
    with open_store(url) as store:
        assert store.delete([EntryKey(connector.namespace, "a")]) == 1
    assert connector.has_cache_item("a")
    connector.update_state_after_alloc(request, 0)
    connector.bind_connector_metadata(connector.build_connector_meta(Step(request)))
    cache: dict[str, Any] = {}
    connector.start_load_caches(cache)

    assert cache["a"].equal(vllm.tensor(3.0))
    assert connector.build_connector_meta(Step()).loads == {}
    connector.request_finished(request)
    assert not connector.has_cache_item("a")


@pytest.mark.fault(21)
@pytest.mark.parametrize("media", [True, False])
def test_a_miss_is_encoded_here_or_fails_alone(vllm: Any, connect: Connect, media: bool) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("missing", media=media))

    assert settle(connector, request) == (set() if media else {"r"})
    assert not connector.has_cache_item("missing")
    assert counted(connector).get("failed_requests", 0) == (0 if media else 1)


@pytest.mark.fault(20)
@pytest.mark.security("S16")
@pytest.mark.parametrize("media", [True, False])
def test_an_entry_of_another_shape_is_a_miss(
    vllm: Any, connect: Connect, url: str, media: bool
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry(rows=5))
    request = vllm.request(vllm.feature("a", media=media))

    assert settle(connector, request) == (set() if media else {"r"})
    assert not connector.has_cache_item("a")
    assert counted(connector)["misfits"] == 1


def test_items_whose_tokens_are_computed_are_not_looked_for(vllm: Any, connect: Connect) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a", media=False, offset=2))

    assert connector.ensure_cache_available(request, 6)
    assert counted(connector) == {}
    assert not connector.ensure_cache_available(request, 5)


def test_a_preempted_request_begins_anew(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect(keep_bytes=0)
    put(connector, url, "a", vllm.entry())
    request = vllm.request(vllm.feature("a"))
    settle(connector, request)
    request.num_preemptions += 1

    assert settle(connector, request) == set()
    assert connector.has_cache_item("a")
    connector.request_finished(request)
    assert not connector.has_cache_item("a")


@pytest.mark.fault(20)
def test_a_corrupt_entry_is_a_miss_and_counted(
    vllm: Any, connect: Connect, url: str, tmp_path: Path
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    [path] = [path for path in (tmp_path / "store" / "entries").rglob("*") if path.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o640)
    path.write_bytes(content)

    assert settle(connector, vllm.request(vllm.feature("a"))) == set()
    figures = counted(connector)
    assert (figures["misses"], figures["corrupt"]) == (1, 1)


def test_an_exception_fails_the_request_alone(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()

    def poll(*_: object, **__: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("ec_store.fetcher.Fetcher.poll", poll)
    request = vllm.request(vllm.feature("a", media=False))

    assert not connector.ensure_cache_available(request, 0)
    assert connector.take_unavailable_requests() == {"r"}
    assert counted(connector) == {"exceptions": 1, "failed_requests": 1}


@pytest.mark.fault(16)
@pytest.mark.fault(25)
def test_a_store_that_hangs_holds_no_call_up(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect(timeout_s=0.2)
    go = threading.Event()
    monkeypatch.setattr(type(connector._store), "get", lambda *_: go.wait(30) and None)  # noqa: SLF001
    request = vllm.request(*(vllm.feature(str(n), offset=4 * n) for n in range(8)))
    try:
        started = time.monotonic()
        assert not connector.ensure_cache_available(request, 0)
        assert settle(connector, request) == set()
        assert time.monotonic() - started < 15  # eight gets take two minutes on four threads
    finally:
        go.set()
    assert counted(connector)["timeouts"] == 8


@pytest.mark.parametrize(
    "options", [{"queue_length": 3}, {"timeout_s": 0}, {"keep_bytes": "much"}], ids=str
)
def test_what_is_wrong_in_the_options_is_said(connect: Connect, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        connect(**options)


def test_sizes_have_units(connect: Connect) -> None:
    connect(keep_bytes="1GiB", queue_bytes="64MB")


def test_the_served_name_is_registered(connect: Connect, url: str) -> None:
    connector = connect()
    with open_store(url) as store:
        assert store.namespaces() == {"tiny": connector.namespace}


def test_a_store_that_takes_no_names_is_no_reason_not_to_serve(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register_namespace(*_: object) -> None:
        raise StoreUnavailable("read-only")

    monkeypatch.setattr(
        "ec_store.shared_disk.SharedDiskStore.register_namespace", register_namespace
    )
    assert settle(connect(), vllm.request(vllm.feature("a"))) == set()


@pytest.mark.security("S17")
def test_models_share_a_namespace_only_where_their_configuration_is_one(
    vllm: Any, connect: Connect
) -> None:
    derived, named = connect().namespace, connect(namespace="acme").namespace
    with vllm.model(model="/elsewhere/tiny"):
        assert connect().namespace != derived
        assert connect(namespace="acme").namespace == named
    with vllm.model(quantization="fp8"):
        assert connect().namespace != derived
        assert connect(namespace="acme").namespace != named
    assert derived != named
    assert connect().namespace == derived


class Failing:
    """A store that cannot be written to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def lease(self, keys: list[EntryKey], _: float) -> list[EntryInfo | None]:
        self.go.wait(30)
        return [None for _ in keys]

    def put(self, key: EntryKey, entry: Entry) -> bool:
        raise StoreUnavailable("full")


def named(connector: Any, request: Any) -> set[str]:
    """What a reply names."""
    _, reported = connector.request_finished(request)
    return set(reported or {})


def test_a_producer_names_what_is_stored_or_on_its_way(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect(step.items, {"a": vllm.tensor(1.0)})
        saver.save("b", vllm.tensor(2.0))
        _, reported = connector.request_finished(request)
        saver.close()

        assert reported == {
            name: {
                "item_indices": [index],
                "metadata": {"image_grid_thw": [1, 1, 1]},
                "namespace": connector.namespace,
            }
            for index, name in enumerate("ab")
        }
        for name, fill in (("a", 1.0), ("b", 2.0)):
            assert store.get(EntryKey(connector.namespace, name)) == vllm.entry(fill)
    assert counted(connector)["saves"] == 2


def test_a_producer_does_not_name_what_was_dropped_until_it_is_stored(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    saver = vllm.saver(connector, Failing())
    saver.expect(step.items, {})
    saver.save("a", vllm.tensor())
    saver.close()

    assert named(connector, request) == {"b"}
    assert counted(connector)["drops"] == 1

    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect(step.items, {"a": vllm.tensor()})
        saver.close()
    assert named(connector, request) == {"a", "b"}


def test_what_the_queue_has_no_room_for_is_not_named_in_the_reply_of_its_own_step(
    vllm: Any, connect: Connect
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    store = Failing()
    store.go.clear()
    saver = vllm.saver(connector, store, queue_bytes=1)
    saver.expect(step.items, {})
    saver.save("a", vllm.tensor())
    saver.save("b", vllm.tensor())
    saver.tell()
    names = named(connector, request)
    store.go.set()
    saver.close()

    assert names == {"a"}


def test_outcomes_wait_for_a_scheduler_that_does_not_listen(vllm: Any, connect: Connect) -> None:
    """More of them than one message takes, and more messages than the kernel queues."""
    connector = connect()
    items = [vllm.feature(str(number), offset=4 * number) for number in range(1500)]
    request = vllm.request(*items)
    step = connector.build_connector_meta(Step(request))
    store = Failing()
    store.go.clear()
    saver = vllm.saver(connector, store, queue_bytes=1)
    saver.expect(step.items, {})
    for item in items:
        saver.save(item.identifier, vllm.tensor())
    sender = Sender(vllm.engine)
    while sender.send({}):
        pass
    sender.close()
    # The first waits to be written, the others were dropped.
    saver.tell()
    unheard = named(connector, request)
    for _ in range(3):
        saver.tell()
        connector.get_ec_connector_stats()
    heard = named(connector, request)
    store.go.set()
    saver.close()

    assert len(unheard) == len(items)
    assert heard == {"0"}


def test_messages_of_other_users_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"users-{time.monotonic_ns()}"
    receiver, sender = Receiver(name), Sender(name)
    assert sender.send({"counts": {}})
    assert list(receiver.drain()) == [{"counts": {}}]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert sender.send({"counts": {}})

    assert list(receiver.drain()) == []
    receiver.close()
    assert not sender.send({"counts": {}})
    sender.close()


def ask(connector: Any, vllm: Any, name: str, *features: Any) -> tuple[Any, set[str]]:
    """A request of this name, settled, and the requests that are to fail for it."""
    request = vllm.request(*features)
    request.request_id = name
    return request, settle(connector, request)


def test_an_entry_held_for_one_request_is_not_given_to_another_it_does_not_fit(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    _, none = ask(connector, vllm, "held", vllm.feature("a", media=False))
    misfit, failed = ask(connector, vllm, "misfit", vllm.feature("a", tokens=9))

    assert (none, failed) == (set(), {"misfit"})
    connector.request_finished(misfit)
    assert connector.has_cache_item("a")
    _, failed = ask(connector, vllm, "twice", vllm.feature("a"), vllm.feature("a", tokens=9))
    assert failed == {"twice"}


@pytest.mark.parametrize("media", [True, False])
def test_nothing_is_held_that_does_not_fit_a_request_that_encodes_its_item(
    vllm: Any, connect: Connect, url: str, media: bool
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    local, failed = ask(connector, vllm, "local", vllm.feature("a", tokens=9))
    later = vllm.feature("a", media=media)

    assert failed == set()
    assert ask(connector, vllm, "later", later)[1] == (set() if media else {"later"})
    assert not connector.has_cache_item("a")
    # Its tokens are computed: it will not be given the entry.
    assert connector.ensure_cache_available(local, 11)
    assert ask(connector, vllm, "last", vllm.feature("a", media=False))[1] == set()
    assert connector.has_cache_item("a")


def test_a_request_that_encodes_its_item_does_not_keep_others_from_its_entry(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    ask(connector, vllm, "local", vllm.feature("a"))
    put(connector, url, "a", vllm.entry())

    assert ask(connector, vllm, "later", vllm.feature("a", media=False))[1] == set()
    assert connector.has_cache_item("a")


def test_what_an_aborted_request_waited_for_is_forgotten(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    go = threading.Event()
    monkeypatch.setattr(type(connector._store), "get", lambda *_: go.wait(30) and None)  # noqa: SLF001
    fetches = connector._consumer._fetcher._fetches  # noqa: SLF001
    first, second = vllm.request(vllm.feature("a")), vllm.request(vllm.feature("a"))
    second.request_id = "second"
    for request in (first, second):
        connector.ensure_cache_available(request, 0)

    connector.request_finished(first)
    assert set(fetches) == {"a"}
    connector.request_finished(second)
    assert not fetches
    go.set()


def test_a_request_that_failed_is_counted_once_and_looks_no_further(
    vllm: Any, connect: Connect
) -> None:
    connector = connect()
    items = [
        vllm.feature(name, media=False, offset=offset) for name, offset in (("a", 2), ("b", 8))
    ]
    request = vllm.request(*items)
    consumer = connector._consumer  # noqa: SLF001
    until(lambda: connector.ensure_cache_available(request, 0) or consumer._unavailable)  # noqa: SLF001
    for _ in range(3):
        time.sleep(0.05)
        assert not connector.ensure_cache_available(request, 0)

    assert connector.take_unavailable_requests() == {"r"}
    assert counted(connector)["failed_requests"] == 1


def test_a_preempted_request_keeps_what_is_held_for_it(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect(keep_bytes=0)
    put(connector, url, "a", vllm.entry())
    request, _ = ask(connector, vllm, "r", vllm.feature("a", media=False))
    with open_store(url) as store:
        assert store.delete([EntryKey(connector.namespace, "a")]) == 1
    request.num_preemptions += 1

    assert settle(connector, request) == set()
    assert connector.has_cache_item("a")
    connector.request_finished(request)
    assert not connector.has_cache_item("a")


def test_a_key_that_no_store_holds_is_a_miss_and_is_not_named(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    long = [f"{number}" + "u" * 70_000 for number in range(4)]
    for name in long:
        request, failed = ask(connector, vllm, "r", vllm.feature(name))
        assert failed == set()
        connector.request_finished(request)
    assert ask(connector, vllm, "b", vllm.feature("a", media=False))[1] == set()

    request = vllm.request(vllm.feature("a"), vllm.feature(long[0], offset=10))
    step = connector.build_connector_meta(Step(request))
    assert named(connector, request) == {"a"}
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect(step.items, {long[0]: vllm.tensor()})
        saver.close()
    figures = counted(connector)
    assert "errors" not in figures
    assert "exceptions" not in figures


def test_an_exception_in_one_part_leaves_the_others_alone(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    request, _ = ask(connector, vllm, "r", vllm.feature("a", media=False))
    connector.update_state_after_alloc(request, 0)
    assert set(connector.build_connector_meta(Step(object())).loads) == {"a"}

    closed = []

    def close(*_: object) -> None:
        raise OSError("bug")

    monkeypatch.setattr("ec_store.vllm_connector.consumer.Consumer.close", close)
    monkeypatch.setattr(connector._store, "close", lambda: closed.append(1))  # noqa: SLF001
    connector.shutdown()
    assert closed == [1]
    monkeypatch.undo()


def test_engines_start_whatever_they_are_called(connect: Connect, vllm: Any) -> None:
    name = f"{time.monotonic_ns()}" + "x" * 200
    first, second, sender = Receiver(name), Receiver(name), Sender(name)
    assert sender.send({"counts": {}})

    assert list(second.drain()) == []
    assert list(first.drain()) == [{"counts": {}}]
    for end in (first, second, sender):
        end.close()


def test_a_message_that_is_none_is_skipped() -> None:
    name = f"malformed-{time.monotonic_ns()}"
    receiver, sender = Receiver(name), Sender(name)
    for sent in (b"{", b"\xff", b"[]"):
        sender._socket.sendto(sent, sender._address)  # noqa: SLF001
    assert sender.send({"counts": {}})

    assert list(receiver.drain()) == [{"counts": {}}]
    receiver.close()
    sender.close()


def test_what_is_written_during_a_step_leaves_room_for_what_the_step_tells(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    items = [vllm.feature(str(number), offset=4 * number) for number in range(40)]
    request = vllm.request(*items)
    step = connector.build_connector_meta(Step(request))
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect(step.items, {})
        for item in items[1:]:
            saver.save(item.identifier, vllm.tensor())
            until(lambda: not saver._writer._waiting)  # noqa: SLF001
        monkeypatch.setattr(store, "put", Failing().put)
        saver.save("0", vllm.tensor())
        until(lambda: not saver._writer._waiting)  # noqa: SLF001
        time.sleep(0.05)
        saver.tell()
        assert "0" not in named(connector, request)
        saver.close()


@pytest.mark.security("S17")
def test_encoders_that_compute_otherwise_share_nothing(vllm: Any, connect: Connect) -> None:
    derived = connect().namespace
    with vllm.encoder(mm_encoder_attn_dtype="fp8"):
        assert connect().namespace != derived
    assert connect().namespace == derived
