"""Connector in workers: which ranks write and load, and vLLM's model runner V2."""

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ec_store import EntryKey, memory_left, open_store
from tests.ec_store.conftest import NoThreads
from tests.ec_store.vllm_connector.steps import Connect
from tests.ec_store.waiting import until


@pytest.mark.parametrize(
    ("tensor_rank", "context_rank", "written"),
    [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)],
)
def test_one_rank_of_those_with_the_same_tensors_writes(
    vllm: Any,
    monkeypatch: pytest.MonkeyPatch,
    tensor_rank: int,
    context_rank: int,
    written: bool,
) -> None:
    vllm.be_rank(monkeypatch, tensor_rank, 2, context=context_rank)
    assert vllm.writes() == written


@pytest.fixture
def runner(vllm: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the part of vLLM's model runner V2 that calls our connector, in one process."""
    both = vllm.engine_of_one_process({"store": url}, monkeypatch)
    yield both
    for connector in (both.scheduler, both.worker):
        connector.shutdown()


def test_model_runner_v2_saves_the_outputs_of_a_step(runner: Any, vllm: Any, url: str) -> None:
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    with runner.step(request) as output:
        runner.cache["a"] = vllm.tensor(1.0)
        runner.cache["b"] = vllm.tensor(2.0)
    assert output is not None
    _, named = runner.scheduler.request_finished(request)
    runner.worker.shutdown()

    assert set(named) == {"a", "b"}
    with open_store(url) as store:
        for name, fill in (("a", 1.0), ("b", 2.0)):
            assert store.get(EntryKey(runner.worker.namespace, name)) == vllm.entry(fill)


def test_model_runner_v2_loads_before_a_step_and_does_not_save_that_again(
    runner: Any, vllm: Any, url: str
) -> None:
    with open_store(url) as store:
        store.put(EntryKey(runner.scheduler.namespace, "a"), vllm.entry(3.0))
    request = vllm.request(vllm.feature("a", media=False))
    runner.settle(request)
    runner.scheduler.update_state_after_alloc(request, 0)
    with runner.step(request):
        assert runner.cache["a"].equal(vllm.tensor(3.0))
    runner.worker.shutdown()

    figures = runner.scheduler.get_ec_connector_stats().data
    assert (figures["hits"], figures.get("saves", 0)) == (1, 0)


def test_model_runner_v2_takes_a_step_without_a_forward_pass(runner: Any, vllm: Any) -> None:
    request = vllm.request(vllm.feature("a"))
    runner.cache["a"] = vllm.tensor()
    output = runner.active.no_forward(runner.scheduled(request))

    assert output.req_ids == []
    runner.worker.shutdown()
    figures = runner.scheduler.get_ec_connector_stats().data
    assert figures["saves"] == len(figures["save_seconds"]) == 1


def test_time_that_a_write_spends_evicting_reaches_the_scheduler(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}/small?max_bytes=32KiB"
    runner = vllm.engine_of_one_process({"store": store}, monkeypatch)
    names = [str(number) for number in range(6)]
    request = vllm.request(
        *(vllm.feature(name, offset=10 * number) for number, name in enumerate(names))
    )
    with runner.step(request):
        for name in names:
            runner.cache[name] = vllm.tensor()
    runner.worker.shutdown()
    figures = runner.scheduler.get_ec_connector_stats().data
    runner.scheduler.shutdown()

    assert figures["saves"] == len(figures["save_seconds"]) == len(names)
    assert len(figures["eviction_seconds"]) >= 1
    assert sum(figures["eviction_seconds"]) < sum(figures["save_seconds"])


def step_that_loads(connector: Any, vllm: Any, url: str, name: str, rows: int) -> Any:
    """Return the metadata of a step that loads an entry, after its request has ended."""
    with open_store(url) as store:
        store.put(EntryKey(connector.namespace, name), vllm.entry(3.0, rows))
    request = vllm.request(vllm.feature(name, media=False, tokens=rows))
    request.request_id = name
    until(lambda: connector.ensure_cache_available(request, 0))
    connector.update_state_after_alloc(request, 0)
    step = connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[request]))
    connector.request_finished(request)
    return step


@pytest.mark.parametrize("rows", [4, 4000])
def test_a_step_for_several_workers_has_places_in_shared_memory(
    vllm: Any, connect: Connect, url: str, rows: int
) -> None:
    from ec_store.engine.tensors import Loader  # noqa: PLC0415 - needs torch

    with vllm.ranks(2, stages=2):
        connector = connect(memory_bytes=1, region_bytes="16MiB")
    workers = [Loader(number) for number in range(2)]
    region = connector._sharing._region  # noqa: SLF001

    first = step_that_loads(connector, vllm, url, "a", rows)
    assert [vllm.load(one, first)["a"].equal(vllm.tensor(3.0, rows)) for one in workers] == [
        True,
        True,
    ]
    deadline = time.monotonic() + 60
    while not region.is_mapped():
        assert time.monotonic() < deadline
    sent = [step_that_loads(connector, vllm, url, name, rows) for name in "bc"]
    steps = [pickle.loads(pickle.dumps(step)) for step in sent]  # noqa: S301 - vLLM sends it like this
    held = region.taken_bytes()
    loaded = [vllm.load(one, step) for step in steps for one in workers]

    assert max(len(pickle.dumps(step)) for step in sent) < 1500
    assert [cache.popitem()[1].equal(vllm.tensor(3.0, rows)) for cache in loaded] == [True] * 4
    assert held >= 2 * rows * 1024
    connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
    assert region.taken_bytes() <= max(4096, rows * 1024)  # the fetcher keeps this entry


def test_an_entry_that_shared_memory_has_no_room_for_comes_with_the_step(
    vllm: Any, connect: Connect, url: str
) -> None:
    from ec_store.engine.tensors import Loader  # noqa: PLC0415 - needs torch

    with vllm.ranks(2):
        connector = connect(region_bytes=8192)
    worker, other = Loader(0), Loader(1)
    empty = connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
    assert [vllm.load(one, empty) for one in (worker, other)] == [{}, {}]
    while not connector._sharing._region.is_mapped():  # noqa: SLF001
        time.sleep(0.002)
    step = step_that_loads(connector, vllm, url, "a", 64)

    assert vllm.load(worker, step)["a"].equal(vllm.tensor(3.0, 64))


@pytest.mark.parametrize("method", ["find_place", "is_mapped", "send", "shared_region"])
def test_shared_memory_that_fails_keeps_no_entry_from_a_step(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An absent entry of the plan ends the engine, as an exception does."""
    from ec_store.engine.tensors import Loader  # noqa: PLC0415 - needs torch

    def fail(*_: object) -> None:
        raise ValueError("mmap closed or invalid")

    with vllm.ranks(2):
        connector = connect()
    workers = [Loader(number) for number in range(2)]
    region = connector._sharing._region  # noqa: SLF001
    empty = connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
    assert [vllm.load(one, empty) for one in workers] == [{}, {}]
    while not region.is_mapped():
        time.sleep(0.002)
    with monkeypatch.context() as patch:
        patch.setattr(region, method, fail)
        step = step_that_loads(connector, vllm, url, "a", 4)
    step = pickle.loads(pickle.dumps(step))  # noqa: S301 - vLLM sends it like this
    loaded = [vllm.load(one, step)["a"] for one in workers]

    assert [one.equal(vllm.tensor(3.0)) for one in loaded] == [True, True]
    assert connector.get_ec_connector_stats().data["exceptions"] == 1
    later = step_that_loads(connector, vllm, url, "b", 4)
    assert vllm.load(workers[0], later)["b"].equal(vllm.tensor(3.0))


def step_of_a_consumer(
    vllm: Any, url: str, monkeypatch: pytest.MonkeyPatch, no_threads: Any
) -> Any:
    """Return scheduler, worker, and a step that loads "a"; neither could start a thread before."""
    with vllm.ranks(2), no_threads():
        scheduler = vllm.connector({"store": url})
        worker = vllm.worker(monkeypatch)
    worker.bind_connector_metadata(step_that_loads(scheduler, vllm, url, "a", 4))
    return scheduler, worker


@pytest.mark.fault(87)
def test_a_step_has_its_entries_while_no_thread_can_be_started(
    vllm: Any, url: str, monkeypatch: pytest.MonkeyPatch, no_threads: NoThreads
) -> None:
    scheduler, worker = step_of_a_consumer(vllm, url, monkeypatch, no_threads)
    cache: dict[str, Any] = {}
    with no_threads():
        worker.start_load_caches(cache)
        worker.start_save_caches(encoder_cache=cache)
        worker.save_caches(cache, "a")
        worker.build_connector_worker_meta()
    assert cache["a"].equal(vllm.tensor(3.0))
    assert worker._loader._mapping is None  # noqa: SLF001

    worker.start_load_caches(cache)
    assert worker._loader._mapping is not None  # noqa: SLF001 - the next step tries again
    for connector in (worker, scheduler):
        connector.shutdown()


@pytest.mark.fault(87)
@pytest.mark.parametrize(
    "failing",
    ["Loader.map_shared", "Loader.finish", "Loader.report_copies", "Learner.expect_items"],
)
def test_a_failure_beside_the_loads_of_a_step_costs_it_nothing(
    vllm: Any, url: str, monkeypatch: pytest.MonkeyPatch, no_threads: NoThreads, failing: str
) -> None:
    from ec_store.vllm_connector import worker as module  # noqa: PLC0415 - needs torch

    def fail(*_: object) -> None:
        raise RuntimeError("device")

    name, _, method = failing.partition(".")
    monkeypatch.setattr(getattr(module, name), method, fail)
    scheduler, worker = step_of_a_consumer(vllm, url, monkeypatch, no_threads)
    cache: dict[str, Any] = {}
    worker.start_load_caches(cache)
    worker.build_connector_worker_meta()
    figures = scheduler.get_ec_connector_stats().data
    for connector in (worker, scheduler):
        connector.shutdown()

    assert cache["a"].equal(vllm.tensor(3.0))
    assert figures["exceptions"] == 1


@pytest.mark.fault(87)
def test_an_item_that_cannot_be_copied_costs_no_other_one_and_is_not_named(
    vllm: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = vllm.engine_of_one_process({"store": url}, monkeypatch)
    copies = runner.worker._saver._copies  # noqa: SLF001
    start = copies.start

    def refuse(tensor: Any) -> Any:
        if tensor[0, 0] == 1.0:
            raise RuntimeError("can't start new thread")
        return start(tensor)

    monkeypatch.setattr(copies, "start", refuse)
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    runner.cache.update(a=vllm.tensor(1.0), b=vllm.tensor(2.0))
    with runner.step(request):  # both were encoded before
        pass
    runner.worker.shutdown()
    _, named = runner.scheduler.request_finished(request)
    figures = runner.scheduler.get_ec_connector_stats().data
    runner.scheduler.shutdown()

    assert set(named) == {"b"}
    assert (figures["exceptions"], figures["drops"], figures["saves"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ({"tensor": 2, "hosts": 2}, {}),
        ({"tensor": 2}, {"region_bytes": 0}),
        ({"tensor": 1, "stages": 2}, {}),
        (None, {}),
    ],
    ids=["hosts", "off", "one reader", "one process"],
)
def test_steps_bring_entries_where_no_memory_is_shared(
    vllm: Any, connect: Connect, url: str, ranks: Any, options: Any
) -> None:
    if ranks is None:
        connector = connect(**options)
    else:
        with vllm.ranks(**ranks):
            connector = connect(**options)
    step = step_that_loads(connector, vllm, url, "a", 4)

    assert step.shared is None
    assert step.loads["a"].raw.nbytes == vllm.tensor().nbytes


def test_steps_carry_entries_if_no_memory_is_shared(
    vllm: Any,
    connect: Connect,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = OSError(12, "Cannot allocate memory")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    with vllm.ranks(2):
        connector = connect()
    step = step_that_loads(connector, vllm, url, "a", 4)

    assert step.shared is None
    [record] = [one for one in caplog.records if "Cannot allocate memory" in one.getMessage()]
    assert "region_bytes" in record.getMessage()


@pytest.mark.fault(88)
def test_shared_memory_larger_than_the_memory_left_is_not_made(
    vllm: Any,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel would end the process, without a line in the log."""
    monkeypatch.setattr(memory_left, "available_bytes", lambda: 2**20)
    with vllm.ranks(2):
        connector = connect()

    assert connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[])).shared is None
    [record] = [one for one in caplog.records if "1048576 are left" in one.getMessage()]
    assert "region_bytes" in record.getMessage()


@pytest.mark.parametrize(
    ("rank", "number"),
    [((True, 0, 0), 0), ((True, 0, 3), 3), ((True, 1, 2), 6), ((False, 0, 0), None)],
)
def test_ranks_of_the_first_stage_load_and_are_numbered(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, rank: tuple[bool, int, int], number: int | None
) -> None:
    first, context, tensor = rank
    vllm.be_rank(monkeypatch, tensor, 4, first_stage=first, context=context)
    assert vllm.reader() == number


def test_entries_have_the_encode_seconds_of_earlier_steps(
    runner: Any, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = runner.worker._store  # noqa: SLF001
    put, found = store.put, list[float]()

    def record(key: EntryKey, entry: Any) -> Any:
        found.append(entry.encode_s)
        return put(key, entry)

    monkeypatch.setattr(store, "put", record)
    for encodes, name in zip([False, True, True, True, True], "abcde", strict=True):
        step = SimpleNamespace(
            scheduled_new_reqs=[vllm.request(vllm.feature(name))],
            finished_req_ids=set(),
            scheduled_encoder_inputs={"r": [0]} if encodes else {},
        )
        step.ec_connector_metadata = runner.scheduler.build_connector_meta(step)
        with runner.active.maybe_get_output(step):
            time.sleep(0.001)
            runner.cache[name] = vllm.tensor()
    runner.worker.shutdown()

    assert found[:4] == [0.0] * 4
    assert found[4] >= 0.001
