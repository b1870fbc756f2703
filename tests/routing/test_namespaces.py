"""Namespace of each instance, as known to the proxy."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import NoInstance, UpstreamUnreachable
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.reports import NAMESPACE, read_namespace, writes_outputs
from epd.routing.table import Candidate, InstanceTable

E1, E2, E3 = (Instance(Role.ENCODE, f"http://e{n}") for n in (1, 2, 3))
D1, D2 = (Instance(Role.PREFILL_DECODE, f"http://d{n}") for n in (1, 2))


@pytest.fixture
def table() -> InstanceTable:
    return InstanceTable([E1, D1, D2])


@pytest.fixture
def namespaces(table: InstanceTable) -> Namespaces:
    return Namespaces(table)


def test_an_answer_that_does_not_come_changes_nothing(namespaces: Namespaces) -> None:
    namespaces.record_namespace(D1, "a")
    namespaces.record_namespace(D1, None)
    assert namespaces.namespace_of(D1) == "a"
    namespaces.record_namespace(D1, "")
    assert namespaces.namespace_of(D1) is None


def test_the_namespace_of_a_removed_instance_is_ignored(
    namespaces: Namespaces, table: InstanceTable
) -> None:
    table.remove(D1)
    namespaces.record_namespace(D1, "a")
    namespaces.record_writes(D1, writes=True)
    assert namespaces.namespace_of(D1) is None


def test_an_instance_with_a_new_weight_keeps_its_namespace(namespaces: Namespaces) -> None:
    namespaces.record_namespace(D1, "a")
    assert namespaces.namespace_of(Instance(D1.role, D1.url, weight=0.5)) == "a"


def test_namespaces_are_looked_up_only_for_consumers(namespaces: Namespaces) -> None:
    namespaces.record_namespace(E1, "encode's")
    assert namespaces.of_consumers() == frozenset()
    namespaces.record_namespace(D1, "a")
    assert namespaces.of_consumers() == {"a"}
    namespaces.record_namespace(D2, "b")
    assert namespaces.of_consumers() == {"a", "b"}


def test_an_instance_shares_unless_it_is_known_not_to(namespaces: Namespaces) -> None:
    assert namespaces.shares_namespace(E1, "a")
    namespaces.record_namespace(E1, "b")
    assert not namespaces.shares_namespace(E1, "a")
    assert namespaces.shares_namespace(E1, "b")
    assert namespaces.shares_namespace(E1, None)


def test_no_instance_that_does_not_fit_is_chosen() -> None:
    choice = Choice(InstanceTable([E1, E2]), Role.ENCODE)

    assert {
        choice.best_instance(balance="round_robin", fits=lambda one: one == E2) for _ in range(5)
    } == {E2}
    assert choice.has_untried([E1], lambda one: one == E2)
    assert not choice.has_untried([E2], lambda one: one == E2)
    with pytest.raises(NoInstance, match="namespace"):
        choice.best_instance(fits=lambda _: False)


def test_no_instance_that_does_not_fit_is_chosen_when_all_others_were_tried() -> None:
    choice = Choice(InstanceTable([E1, E2]), Role.ENCODE)

    assert choice.best_instance(tried=[E2], fits=lambda one: one == E2) == E2


@pytest.mark.fault(5)
def test_a_down_instance_that_fits_is_tried_before_one_that_does_not() -> None:
    table = InstanceTable([E1, E2, E3])
    for _ in range(10):
        with suppress(UpstreamUnreachable), table.track_request(E1):
            raise UpstreamUnreachable("x")
    choice = Choice(table, Role.ENCODE)
    fits = {E1, E2}.__contains__

    assert choice.has_untried([E2], fits)
    assert choice.best_instance(tried=[E2], fits=fits) == E1


def test_a_namespace_that_an_engine_no_longer_names_does_not_count() -> None:
    """The engine's scheduler has derived another one."""
    before = page('engine="0",namespace="b"')
    withdrawn = before.replace(b'"b"} 1.0', b'"b"} 0.0')

    assert read_namespace(withdrawn + page('engine="0",namespace="a"')) == "a"
    assert not read_namespace(before + page('engine="0",namespace="a"'))
    assert not read_namespace(withdrawn)
    assert not read_namespace(before.replace(b'"b"} 1.0', b'"b"} one'))


def page(*labels: str) -> bytes:
    samples = "".join(f"vllm:ec_store_namespace_info{{{one}}} 1.0\n" for one in labels)
    return f'# TYPE x gauge\nvllm:ec_store_namespace_infos{{namespace="no"}} 1\n{samples}'.encode()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((), ""),
        (('engine="0",model_name="m",namespace="qwen@0:12"',), "qwen@0:12"),
        (('namespace="qwen@0:12",pid="1"',), "qwen@0:12"),
        (('engine="0",namespace="a"', 'engine="1",namespace="a"'), "a"),
        (('engine="0",namespace="a"', 'engine="1",namespace="b"'), ""),
        (('engine="0",namespace="a"', 'engine="1"'), ""),
        (('engine="0",other_namespace="a"',), ""),
        ((f'namespace="{"a" * 256}"',), "a" * 256),
        ((f'namespace="{"a" * 257}"',), ""),
        ((r'namespace="a\"b"',), ""),
    ],
)
def test_namespace_on_a_page_of_metrics(labels: tuple[str, ...], expected: str) -> None:
    assert read_namespace(page(*labels)) == expected


@given(st.binary(max_size=300))
def test_any_page_is_read(content: bytes) -> None:
    assert read_namespace(b"\n" + NAMESPACE + content) is not None
    assert read_namespace(page('namespace="a"').replace(b'"a"', b'"' + content + b'"')) is not None


@pytest.mark.parametrize("instances", [2, 200])
def test_the_namespace_of_a_request_does_not_depend_on_the_number_of_consumers(
    instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers = [Instance(Role.PREFILL_DECODE, f"http://d{n}") for n in range(instances)]
    table = InstanceTable(consumers)
    namespaces, looks = Namespaces(table), list[str]()
    namespaces.record_namespace(consumers[0], "a")

    def all_of(*_: Role) -> tuple[Candidate, ...]:
        looks.append("look")
        return ()

    monkeypatch.setattr(table, "all", all_of)
    for _ in range(10):
        namespaces.of_consumers()

    assert looks == ["look"]


def test_an_instance_that_leaves_takes_its_namespace_along(
    namespaces: Namespaces, table: InstanceTable
) -> None:
    namespaces.record_namespace(D1, "a")
    namespaces.record_namespace(D2, "b")
    assert namespaces.of_consumers() == {"a", "b"}

    table.remove(D2)
    assert namespaces.of_consumers() == {"a"}
    table.add(D2)
    assert namespaces.of_consumers() == {"a"}
    namespaces.record_namespace(D2, "b")
    assert namespaces.of_consumers() == {"a", "b"}
    namespaces.record_namespace(D2, "")
    assert namespaces.of_consumers() == {"a"}


def test_consumers_write_if_all_are_known_to(namespaces: Namespaces, table: InstanceTable) -> None:
    found = [namespaces.consumers_write()]
    for instance in (E1, D1, D2):
        namespaces.record_writes(instance, writes=True)
        found.append(namespaces.consumers_write())
    namespaces.record_writes(D1, writes=False)
    found.append(namespaces.consumers_write())

    assert found == [False, False, False, True, False]
    table.remove(D1)
    assert namespaces.consumers_write()
    table.remove(D2)
    assert not namespaces.consumers_write()


def test_instance_that_leaves_is_not_known_to_write(
    namespaces: Namespaces, table: InstanceTable
) -> None:
    for instance in (D1, D2):
        namespaces.record_writes(instance, writes=True)
    table.remove(D1)
    table.add(D1)

    assert not namespaces.consumers_write()


@pytest.mark.parametrize(
    ("samples", "writes"),
    [
        ([], False),
        (['engine="0"} 1.0'], True),
        (['engine="0"} 1.0', 'engine="1"} 1.0'], True),
        (['engine="0"} 1.0', 'engine="1"} 0.0'], False),
        (['engine="0"} 0.0'], False),
        (['engine="0"} one'], False),
        (['engine="0"}'], False),
    ],
)
def test_metrics_page_shows_whether_all_engines_write(samples: list[str], writes: bool) -> None:
    lines = "".join(f"vllm:ec_store_producer{{{one}\n" for one in samples)

    assert writes_outputs(f"# TYPE x gauge\n{lines}".encode()) is writes


@given(st.binary())
def test_any_page_may_come_for_writes(content: bytes) -> None:
    assert writes_outputs(b"\nvllm:ec_store_producer" + content) in {True, False}
