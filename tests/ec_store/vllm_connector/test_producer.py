"""Producer: what its workers report, and which stored outputs a reply names."""

import threading
import time
from typing import Any

import pytest

from ec_store import Entry, EntryInfo, EntryKey, StoreUnavailable, open_store
from ec_store.counts import Counts
from ec_store.engine.backchannel import Sender
from tests.ec_store.vllm_connector.steps import Connect, Step, ask, counted, put
from tests.ec_store.waiting import until


class Failing:
    """Store that cannot be written to."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.go = threading.Event()
        self.go.set()

    def lease(self, keys: list[EntryKey], _: float) -> list[EntryInfo | None]:
        self.go.wait(30)
        return [None for _ in keys]

    def put(self, key: EntryKey, entry: Entry) -> bool:
        raise StoreUnavailable("full")


def named(connector: Any, request: Any) -> set[str]:
    """Return the keys that the reply reports."""
    _, reported = connector.request_finished(request)
    return set(reported or {})


def test_producer_names_stored_and_queued_items(vllm: Any, connect: Connect, url: str) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect_items(step.items, {"a": vllm.tensor(1.0)})
        saver.save("b", vllm.tensor(2.0))
        _, reported = connector.request_finished(request)
        saver.close()

        for item in reported.values():
            assert item.pop("modality", "image") == "image"  # from 0.33 on
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


def test_answer_of_more_than_one_token_names_no_entries(vllm: Any, connect: Connect) -> None:
    connector = connect()
    named = [
        connector.request_finished(vllm.request(vllm.feature("a"), max_tokens=count))[1]
        for count in (1, 2)
    ]

    assert [one and [*one] for one in named] == [["a"], None]


def test_producer_does_not_name_dropped_items_until_they_are_stored(
    vllm: Any, connect: Connect, url: str
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    saver = vllm.saver(connector, Failing())
    saver.expect_items(step.items, {})
    saver.save("a", vllm.tensor())
    saver.close()

    assert named(connector, request) == {"b"}
    assert counted(connector)["drops"] == 1

    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect_items(step.items, {"a": vllm.tensor()})
        saver.close()
    assert named(connector, request) == {"a", "b"}


def test_outputs_without_room_in_the_queue_are_not_named_in_their_reply(
    vllm: Any, connect: Connect
) -> None:
    connector = connect()
    request = vllm.request(vllm.feature("a"), vllm.feature("b", offset=10))
    step = connector.build_connector_meta(Step(request))
    store = Failing()
    store.go.clear()
    saver = vllm.saver(connector, store, queue_bytes=1)
    saver.expect_items(step.items, {})
    saver.save("a", vllm.tensor())
    saver.save("b", vllm.tensor())
    saver.send_reports()
    names = named(connector, request)
    store.go.set()
    saver.close()

    assert names == {"a"}


def test_outcomes_wait_for_a_scheduler_that_does_not_listen(vllm: Any, connect: Connect) -> None:
    """There are more outcomes than fit into a message, and more messages than the kernel queues."""
    connector = connect()
    items = [vllm.feature(str(number), offset=4 * number) for number in range(1500)]
    request = vllm.request(*items)
    step = connector.build_connector_meta(Step(request))
    store = Failing()
    store.go.clear()
    saver = vllm.saver(connector, store, queue_bytes=1)
    saver.expect_items(step.items, {})
    for item in items:
        saver.save(item.identifier, vllm.tensor())
    sender = Sender(vllm.engine)
    while sender.send({}):
        pass
    sender.close()
    # The first one waits to be written, the others were dropped.
    saver.send_reports()
    unheard = named(connector, request)
    for _ in range(3):
        saver.send_reports()
        connector.get_ec_connector_stats()
    heard = named(connector, request)
    store.go.set()
    saver.close()

    assert len(unheard) == len(items)
    assert heard == {"0"}


def test_writes_during_a_step_leave_room_for_its_reports(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connect()
    items = [vllm.feature(str(number), offset=4 * number) for number in range(40)]
    request = vllm.request(*items)
    step = connector.build_connector_meta(Step(request))
    with open_store(url) as store:
        saver = vllm.saver(connector, store)
        saver.expect_items(step.items, {})
        for item in items[1:]:
            saver.save(item.identifier, vllm.tensor())
            until(lambda: not saver._writer.waiting_bytes)  # noqa: SLF001
        failed = threading.Event()

        def fails(*_: object) -> bool:
            failed.set()
            raise StoreUnavailable("full")

        monkeypatch.setattr(store, "put", fails)
        saver.save("0", vllm.tensor())
        assert failed.wait(60)
        time.sleep(0.05)
        saver.send_reports()
        assert "0" not in named(connector, request)
        saver.close()


def test_counts_of_workers_are_sent_again_if_the_scheduler_missed_them(
    vllm: Any, connect: Connect
) -> None:
    connector = connect()
    learner, saver = vllm.learner(), vllm.saver(connector, Failing())
    for worker in (learner, saver):
        worker.counts.add(exceptions=2)
    connector.shutdown()
    for worker in (learner, saver):
        worker.send_reports()
        worker.counts.add(exceptions=1)
    receiver = vllm.receiver()
    for worker in (learner, saver):
        worker.send_reports()
    told = [message["counts"] for message in receiver.drain()]
    for part in (learner, saver, receiver):
        part.close()

    assert told == [{"exceptions": 3}, {"exceptions": 3}]


def test_observations_of_a_worker_are_split_into_messages(vllm: Any, connect: Connect) -> None:
    from ec_store.vllm_connector.worker import MAX_TOLD  # noqa: PLC0415 - needs torch

    connector = connect()
    store = Failing()
    saver = vllm.saver(connector, store)
    connector.shutdown()
    store.counts.observe("eviction_seconds", 0.1)
    saver.counts.observe("save_seconds", *range(MAX_TOLD))
    saver.send_reports()  # no receiver
    store.counts.observe("eviction_seconds", 0.2)
    saver.counts.observe("save_seconds", MAX_TOLD)
    receiver = vllm.receiver()
    for _ in range(3):
        saver.send_reports()
    told = [message["observations"] for message in receiver.drain()]
    for part in (saver, receiver):
        part.close()

    assert len(told) == 2
    assert sorted(told[0]["eviction_seconds"]) == [0.1, 0.2]
    assert [len(one["save_seconds"]) for one in told] == [MAX_TOLD, 1]
    assert sorted(told[0]["save_seconds"] + told[1]["save_seconds"]) == list(range(MAX_TOLD + 1))


def test_a_key_too_long_for_the_store_is_a_miss_and_not_named(
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
        saver.expect_items(step.items, {long[0]: vllm.tensor()})
        saver.close()
    figures = counted(connector)
    assert "errors" not in figures
    assert "exceptions" not in figures
