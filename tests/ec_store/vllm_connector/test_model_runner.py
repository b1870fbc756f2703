"""Connector in steps of vLLM's model runner V2, on a fake device: what a GPU does, on a CPU.

The device of these tests runs its work only when something waits for it. So a copy that is made
too early, or on a stream that waits for nothing, has wrong values.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ec_store import EntryKey, open_store
from tests.ec_store.vllm_connector.steps import put


@pytest.fixture(scope="session")
def runners(vllm: Any) -> Any:
    """Return the module `tests.ec_store.vllm_connector.runners`."""
    del vllm  # requested first: it skips without vLLM
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module("tests.ec_store.vllm_connector.runners")


@pytest.fixture
def fake(runners: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fake accelerator as the device of the model."""
    del runners  # requested first: vLLM's annotations need PyTorch's own streams
    fake = importlib.import_module("tests.fake_accelerator").FakeAccelerator(monkeypatch)
    fake.move_here()
    return fake


Start = Callable[..., Any]


@pytest.fixture
def start(
    vllm: Any, runners: Any, fake: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Return a function that makes an engine of a role, its model and its runner."""
    del fake
    with ExitStack() as closing:

        def start(role: str) -> Any:
            with vllm.role(role):
                engine = vllm.engine_of_one_process({"store": url}, monkeypatch)
            for connector in (engine.scheduler, engine.worker):
                closing.callback(connector.shutdown)
            model = runners.Model()
            encodes = role == "ec_producer"
            return engine, model, runners.Runner(engine, model, monkeypatch, encodes=encodes)

        yield start


def stored(engine: Any, url: str, name: str) -> Any:
    """Return the store's entry of an item, after the worker has written all of its own."""
    engine.worker.shutdown()
    with open_store(url) as store:
        return store.get(EntryKey(engine.worker.namespace, name))


def request_of(vllm: Any, name: str, *features: Any) -> Any:
    request = vllm.request(*features)
    request.request_id = name
    return request


def test_an_encode_instance_stores_what_the_device_computes_after_the_step(
    vllm: Any, start: Start, fake: Any, url: str
) -> None:
    engine, model, runner = start("ec_producer")
    fills = iter([1.0, 2.0, 3.0])
    model.encode = lambda count: [fake.tensor(vllm.tensor(next(fills))) for _ in range(count)]
    first = request_of(vllm, "r1", vllm.feature("a"), vllm.feature("b", offset=10))
    second = request_of(vllm, "r2", vllm.feature("c"))

    runner.step(first, encoded=[0, 1])
    runner.step(second, encoded=[0])

    assert [stored(engine, url, name) for name in "abc"] == [
        vllm.entry(fill) for fill in (1.0, 2.0, 3.0)
    ]
    _, named = engine.scheduler.request_finished(first)
    assert set(named) == {"a", "b"}


def test_an_instance_loads_outputs_on_the_models_stream_before_the_model_reads_them(
    vllm: Any, start: Start, fake: Any, url: str
) -> None:
    engine, model, runner = start("ec_consumer")
    put(engine.scheduler, url, "a", vllm.entry(3.0))
    request = request_of(vllm, "r", vllm.feature("a", media=False))
    engine.settle(request)
    engine.scheduler.update_state_after_alloc(request, 0)
    read: list[Any] = []
    model.read = lambda: fake.read([engine.cache["a"]], read)
    model.forward = lambda: read.append("forward")

    runner.step(request)
    fake.finish()

    assert read[0] == "forward"  # the device runs later than the calls
    assert read[1].equal(vllm.tensor(3.0))


def test_a_step_loads_one_item_and_stores_another_that_it_encodes(
    vllm: Any, start: Start, fake: Any, url: str
) -> None:
    engine, model, runner = start("ec_both")
    put(engine.scheduler, url, "a", vllm.entry(3.0))
    request = request_of(vllm, "r", vllm.feature("a"), vllm.feature("b", offset=10))
    engine.settle(request)
    engine.scheduler.update_state_after_alloc(request, 0)
    model.encode = lambda count: [fake.tensor(vllm.tensor(4.0)) for _ in range(count)]
    read: list[Any] = []
    model.read = lambda: fake.read([engine.cache[name] for name in "ab"], read)

    runner.step(request, encoded=[1])
    fake.finish()

    assert [one.mean() for one in read] == [3.0, 4.0]
    assert stored(engine, url, "b") == vllm.entry(4.0)
    assert engine.scheduler.get_ec_connector_stats().data["saves"] == 1


@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
def test_a_step_without_tokens_stores_items_of_earlier_steps(
    vllm: Any, start: Start, fake: Any, url: str, role: str
) -> None:
    engine, model, runner = start(role)
    model.forward = lambda: pytest.fail("the step has no tokens")
    engine.cache["a"] = fake.tensor(vllm.tensor(5.0))

    runner.step(request_of(vllm, "r", vllm.feature("a")), tokens=0)

    assert stored(engine, url, "a") == vllm.entry(5.0)
