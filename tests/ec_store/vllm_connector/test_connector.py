"""Guarantees of the connector to the engine, for each of its methods."""

import threading
import time
from inspect import Parameter, signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ec_store import EntryKey, StoreUnavailable, open_store
from ec_store.disk.store import SharedDiskStore
from ec_store.engine.backchannel import Receiver, Sender
from ec_store.engine.fetcher import Fetcher
from tests.ec_store.vllm_connector.steps import Connect, Step, ask, counted, put, settle
from tests.ec_store.waiting import until


def test_an_entry_is_fetched_before_its_request_is_scheduled_and_kept(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
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
    worker = vllm.worker(monkeypatch)
    worker.bind_connector_metadata(connector.build_connector_meta(Step(request)))
    cache: dict[str, Any] = {}
    worker.start_load_caches(cache)
    worker.shutdown()

    assert cache["a"].equal(vllm.tensor(3.0))
    assert connector.build_connector_meta(Step()).loads == {}
    connector.request_finished(request)
    assert not connector.has_cache_item("a")


@pytest.mark.fault(21)
@pytest.mark.parametrize("media", [True, False])
def test_a_miss_is_encoded_locally_or_fails_only_its_request(
    vllm: Any, connect: Connect, media: bool
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("missing", media=media))

    assert settle(connector, request) == (set() if media else {"r"})
    assert not connector.has_cache_item("missing")
    assert counted(connector).get("failed_requests", 0) == (0 if media else 1)


def test_items_with_computed_tokens_are_not_looked_up(vllm: Any, connect: Connect) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a", media=False, offset=2))

    assert connector.ensure_cache_available(request, 6)
    assert counted(connector) == {}
    assert not connector.ensure_cache_available(request, 5)


def test_a_preempted_request_starts_again(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect()
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


def break_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fetcher, "acquire", Mock(side_effect=KeyError("bug")))


@pytest.mark.parametrize("media", [True, False])
def test_after_an_exception_media_are_encoded_locally_or_the_request_fails(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, media: bool
) -> None:
    connector = connect()
    break_fetcher(monkeypatch)
    request = vllm.request(vllm.feature("a", media=media))

    assert connector.ensure_cache_available(request, 0) == media
    assert connector.take_unavailable_requests() == (set() if media else {"r"})
    figures = counted(connector)
    assert (figures["exceptions"], figures.get("failed_requests", 0)) == (1, 0 if media else 1)
    assert not connector.has_cache_item("a")


def test_an_exception_fails_a_request_if_its_item_is_held_for_another(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would otherwise use the held entry, which may not fit the request."""
    connector = connect()
    put(connector, url, "a", vllm.entry())
    ask(connector, vllm, "held", vllm.feature("a", media=False))
    break_fetcher(monkeypatch)
    request = vllm.request(vllm.feature("a", tokens=9))
    assert not connector.ensure_cache_available(request, 0)
    assert connector.take_unavailable_requests() == {"r"}


def test_a_persistent_exception_fails_the_request(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    has_media = Mock(side_effect=KeyError("bug"))
    monkeypatch.setattr(type(connector._consumer), "_has_media", has_media)  # noqa: SLF001
    request = vllm.request(vllm.feature("missing"))
    assert settle(connector, request) == {"r"}


def test_all_calls_of_vllm_tolerate_more_arguments(connect: Connect) -> None:
    """A TypeError from a signature is raised outside of the guard, and ends the engine."""
    connector = connect()
    calls = [
        "build_connector_meta",
        "build_connector_worker_meta",
        "ensure_cache_available",
        "get_ec_connector_stats",
        "has_cache_item",
        "request_finished",
        "save_caches",
        "start_load_caches",
        "start_save_caches",
        "take_unavailable_requests",
        "update_state_after_alloc",
    ]
    for name in calls:
        kinds = {one.kind for one in signature(getattr(connector, name)).parameters.values()}
        assert {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds, name


def test_arguments_of_other_releases_are_tolerated(vllm: Any, connect: Connect) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"))
    until(lambda: connector.ensure_cache_available(request, 0, {"a"}, local_cache_hashes={"a"}))
    assert connector.ensure_cache_available(request)
    assert counted(connector).get("exceptions", 0) == 0


@pytest.mark.fault(74)
@pytest.mark.parametrize("params", [1, "a", "", [], ["a"], True, None, {}, {"a": 1}, {"a": None}])
def test_transfer_parameters_of_any_type_are_tolerated(
    vllm: Any, connect: Connect, params: object
) -> None:
    """Without a proxy, a client's parameters reach the connector unchanged."""
    connector = connect(promise_timeout_s=0.05)
    request = vllm.request(vllm.feature("a"))
    request.ec_transfer_params = params

    assert settle(connector, request) == set()
    connector.request_finished(request)
    assert counted(connector).get("exceptions", 0) == 0


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let reads of a directory hang until the event is set."""
    go = threading.Event()
    monkeypatch.setattr(SharedDiskStore, "get", lambda *_: go.wait(30) and None)
    return go


@pytest.mark.fault(16)
@pytest.mark.fault(25)
def test_a_store_that_hangs_holds_no_call_up(
    vllm: Any, connect: Connect, hung: threading.Event
) -> None:
    connector = connect(timeout_s=0.2)
    request = vllm.request(*(vllm.feature(str(n), offset=4 * n) for n in range(8)))
    try:
        started = time.monotonic()
        assert not connector.ensure_cache_available(request, 0)
        assert settle(connector, request) == set()
        # Eight hanging gets would take a minute on four threads.
        assert time.monotonic() - started < 15
    finally:
        hung.set()
    figures = counted(connector)
    assert (figures["timeouts"], figures["bypassed"]) == (4, 4)


@pytest.mark.parametrize(
    "options",
    [{"queue_length": 3}, {"timeout_s": 0}, {"memory_bytes": "much"}, {"fetch_threads": 0}],
    ids=str,
)
def test_errors_of_connector_options_are_reported(
    connect: Connect, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        connect(**options)


@pytest.mark.parametrize(
    ("said", "size"), [("2GiB", 2 * 2**30), ("64MB", 64 * 10**6), ("1000", 1000), (1000, 1000)]
)
def test_sizes_have_units(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, said: object, size: int
) -> None:
    connector = connect(memory_bytes=said, queue_bytes=said)
    worker = vllm.worker(monkeypatch)
    worker.shutdown()

    assert connector._fetcher._memory._limit_bytes == size  # noqa: SLF001
    assert worker._saver._writer.queue_bytes == size  # noqa: SLF001


def test_the_served_name_is_registered(connect: Connect, url: str) -> None:
    connector = connect()
    with open_store(url) as store:
        until(lambda: store.namespaces() == {"tiny": connector.namespace})


def test_each_step_starts_the_registration_of_the_namespace_unless_it_runs(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ec_store.engine.registration import NamespaceRegistration  # noqa: PLC0415

    started: list[int] = []
    monkeypatch.setattr(NamespaceRegistration, "start", lambda _: started.append(1))
    connector = connect()
    connector.build_connector_meta(Step())

    assert started == [1, 1]


def test_requests_are_served_if_the_store_rejects_names(
    vllm: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=StoreUnavailable("read-only"))
    monkeypatch.setattr(SharedDiskStore, "register_namespace", refused)
    assert settle(connect(), vllm.request(vllm.feature("a"))) == set()


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
def test_connector_holds_no_entry_that_does_not_fit_a_request_with_the_media(
    vllm: Any, connect: Connect, url: str, media: bool
) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    local, failed = ask(connector, vllm, "local", vllm.feature("a", tokens=9))
    later = vllm.feature("a", media=media)

    assert failed == set()
    assert ask(connector, vllm, "later", later)[1] == (set() if media else {"later"})
    assert not connector.has_cache_item("a")
    # Its tokens are computed, so it does not get the entry.
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


def test_entries_of_an_aborted_request_are_forgotten(
    vllm: Any, connect: Connect, hung: threading.Event
) -> None:
    connector = connect()
    memory = connector._fetcher._memory  # noqa: SLF001
    first, second = vllm.request(vllm.feature("a")), vllm.request(vllm.feature("a"))
    second.request_id = "second"
    for request in (first, second):
        connector.ensure_cache_available(request, 0)

    connector.request_finished(first)
    assert memory.is_pinned("a")
    connector.request_finished(second)
    assert not memory.is_pinned("a")
    hung.set()


def test_a_failed_request_is_counted_once_and_looks_up_nothing_more(
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


def test_a_preempted_request_keeps_its_held_entries(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect()
    put(connector, url, "a", vllm.entry())
    request, _ = ask(connector, vllm, "r", vllm.feature("a", media=False))
    with open_store(url) as store:
        assert store.delete([EntryKey(connector.namespace, "a")]) == 1
    request.num_preemptions += 1

    assert settle(connector, request) == set()
    assert connector.has_cache_item("a")
    connector.request_finished(request)
    assert not connector.has_cache_item("a")


def test_an_exception_in_one_part_does_not_affect_the_others(
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

    monkeypatch.setattr(type(connector._consumer), "close", close)  # noqa: SLF001
    monkeypatch.setattr(connector._store, "close", lambda: closed.append(1))  # noqa: SLF001
    connector.shutdown()
    assert closed == [1]
    monkeypatch.undo()


def test_engines_start_with_any_name(connect: Connect, vllm: Any) -> None:
    name = f"{time.monotonic_ns()}" + "x" * 200
    first, second, sender = Receiver(name), Receiver(name), Sender(name)
    assert sender.send({"counts": {}})

    assert list(second.drain()) == []
    assert list(first.drain()) == [{"counts": {}}]
    for end in (first, second, sender):
        end.close()
