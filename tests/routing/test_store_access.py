"""Namespace and host of each instance, as known to the proxy."""

from collections.abc import Set as AbstractSet
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import NoInstance, UpstreamUnreachable
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.reports import NAMESPACE, Host, read_namespace, writes_outputs
from epd.routing.store_access import StoreAccess
from epd.routing.table import Candidate, InstanceTable

E1, E2, E3 = (Instance(Role.ENCODE, f"http://e{n}") for n in (1, 2, 3))
A, B = (Host(f"shm+tls://{name}:8101", name * 2, "cafe") for name in "ab")
D1, D2 = (Instance(Role.PREFILL_DECODE, f"http://d{n}") for n in (1, 2))


@pytest.fixture
def table() -> InstanceTable:
    return InstanceTable([E1, D1, D2])


@pytest.fixture
def access(table: InstanceTable) -> StoreAccess:
    return StoreAccess(table)


def test_an_answer_that_does_not_come_changes_nothing(access: StoreAccess) -> None:
    access.record_namespace(D1, "a")
    access.record_namespace(D1, None)
    assert access.namespace_of(D1) == "a"
    access.record_namespace(D1, "")
    assert access.namespace_of(D1) is None


def test_the_namespace_of_a_removed_instance_is_ignored(
    access: StoreAccess, table: InstanceTable
) -> None:
    table.remove(D1)
    access.record_namespace(D1, "a")
    access.record_writes(D1, writes=True)
    assert access.namespace_of(D1) is None


def test_an_instance_with_a_new_weight_keeps_its_namespace(access: StoreAccess) -> None:
    access.record_namespace(D1, "a")
    assert access.namespace_of(Instance(D1.role, D1.url, weight=0.5)) == "a"


def test_namespaces_are_looked_up_only_for_consumers(access: StoreAccess) -> None:
    access.record_namespace(E1, "encode's")
    assert access.of_consumers() == frozenset()
    access.record_namespace(D1, "a")
    assert access.of_consumers() == {"a"}
    access.record_namespace(D2, "b")
    assert access.of_consumers() == {"a", "b"}


def test_an_instance_shares_unless_it_is_known_not_to(access: StoreAccess) -> None:
    assert access.shares_namespace(E1, "a")
    access.record_namespace(E1, "b")
    assert not access.shares_namespace(E1, "a")
    assert access.shares_namespace(E1, "b")
    assert access.shares_namespace(E1, None)


def test_no_instance_that_does_not_fit_is_chosen() -> None:
    choice = Choice(InstanceTable([E1, E2]), Role.ENCODE).among(lambda one: one == E2)

    assert {choice.best_instance(balance="round_robin") for _ in range(5)} == {E2}
    assert choice.has_untried([E1])
    assert not choice.has_untried([E2])
    with pytest.raises(NoInstance, match="namespace"):
        choice.among(lambda instance: instance == E1).best_instance()


def test_no_instance_that_does_not_fit_is_chosen_when_all_others_were_tried() -> None:
    choice = Choice(InstanceTable([E1, E2]), Role.ENCODE).among(lambda one: one == E2)

    assert choice.best_instance(tried=[E2]) == E2


@pytest.mark.fault(5)
def test_a_down_instance_that_fits_is_tried_before_one_that_does_not() -> None:
    table = InstanceTable([E1, E2, E3])
    for _ in range(10):
        with suppress(UpstreamUnreachable), table.track_request(E1):
            raise UpstreamUnreachable("x")
    choice = Choice(table, Role.ENCODE).among({E1, E2}.__contains__)

    assert choice.has_untried([E2])
    assert choice.best_instance(tried=[E2]) == E1


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
    access, looks = StoreAccess(table), list[str]()
    access.record_namespace(consumers[0], "a")

    def all_of(*_: Role) -> tuple[Candidate, ...]:
        looks.append("look")
        return ()

    monkeypatch.setattr(table, "all", all_of)
    for _ in range(10):
        access.of_consumers()

    assert looks == ["look"]


def test_an_instance_that_leaves_takes_its_namespace_along(
    access: StoreAccess, table: InstanceTable
) -> None:
    access.record_namespace(D1, "a")
    access.record_namespace(D2, "b")
    assert access.of_consumers() == {"a", "b"}

    table.remove(D2)
    assert access.of_consumers() == {"a"}
    table.add(D2)
    assert access.of_consumers() == {"a"}
    access.record_namespace(D2, "b")
    assert access.of_consumers() == {"a", "b"}
    access.record_namespace(D2, "")
    assert access.of_consumers() == {"a"}


def test_consumers_write_if_all_are_known_to(access: StoreAccess, table: InstanceTable) -> None:
    found = [access.consumers_write()]
    for instance in (E1, D1, D2):
        access.record_writes(instance, writes=True)
        found.append(access.consumers_write())
    access.record_writes(D1, writes=False)
    found.append(access.consumers_write())

    assert found == [False, False, False, True, False]
    table.remove(D1)
    assert access.consumers_write()
    table.remove(D2)
    assert not access.consumers_write()


def test_instance_that_leaves_is_not_known_to_write(
    access: StoreAccess, table: InstanceTable
) -> None:
    for instance in (D1, D2):
        access.record_writes(instance, writes=True)
    table.remove(D1)
    table.add(D1)

    assert not access.consumers_write()


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


def test_an_instance_without_a_named_server_reaches_no_host() -> None:
    table = InstanceTable()
    first, second, gone = (Instance(Role.ENCODE, f"http://{name}:1") for name in "abc")
    table.add(first)
    table.add(second)
    access = StoreAccess(table)
    access.record_host(first, A)
    access.record_host(gone, A)

    assert (access.host_of(first), access.host_of(second), access.host_of(gone)) == (A, None, None)
    assert access.reaches(first, None, B)
    assert not access.reaches(first, None, None)
    access.record_namespace(first, "a")
    assert access.reaches(first, "a", B)
    assert not access.reaches(first, "b", B)
    assert not access.reaches(second, None, B)
    access.record_host(first, None)
    assert access.host_of(first) is None


def test_the_server_of_an_instance_that_left_is_not_used() -> None:
    used: list[AbstractSet[str]] = []
    table = InstanceTable()
    access = StoreAccess(table, used.append)
    for url, address in (("http://a", "x"), ("http://b", "y")):
        instance = Instance(Role.ENCODE, url)
        table.add(instance)
        access.record_host(instance, Host(address, "00"))
    table.remove(instance)
    access.use_servers()

    assert used[-2:] == [{"x", "y"}, {"x"}]
