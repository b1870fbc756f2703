"""What the host of a consumer is worth for a request."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.encoder_cache.identity import Identifiers
from epd.policies.policy import Course
from epd.request.attempt import Attempt
from epd.request.early_choice import EarlyChoice
from epd.routing.instances import Instance, Role
from epd.routing.reports import Host
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable

A, B, C = (Host(f"shm+tcp://{name}:8101", name * 2) for name in "abc")


def fleet(encoders: str, consumers: str, tiers: Mapping[str, str]) -> tuple[EarlyChoice, Any]:
    """Return the choice, and the consumers of these hosts in their order."""
    table = InstanceTable()
    access = StoreAccess(table)
    made = []
    for role, names in ((Role.ENCODE, encoders), (Role.PREFILL_DECODE, consumers)):
        for number, name in enumerate(names):
            instance = Instance(role, f"http://{role}-{number}:1")
            table.add(instance)
            made.append(instance)
            if name != "-":
                host = {"a": A, "b": B, "c": C}[name]
                access.record_host(instance, host._replace(tier=tiers.get(name, "")))
    unused = cast("Any", None)
    choice = EarlyChoice(table, access, unused, False, False, None, None, Identifiers())
    return choice, made[len(encoders) :]


def attempt(items: int) -> Attempt:
    request = SimpleNamespace(items=[object()] * items, body={})
    return Attempt(cast("Any", request), Course(), [])


def entries(*sizes: int) -> dict[EntryKey, EntryInfo]:
    keys = [EntryKey("n", str(number)) for number in range(len(sizes))]
    pairs = zip(keys, sizes, strict=True)
    return {key: EntryInfo(key, "F32", (0, 4), "image", {}, "", size) for key, size in pairs}


@pytest.mark.parametrize(
    ("encoders", "found", "tiers", "expected"),
    [
        ("ab", {A: (10,), B: ()}, {}, [10.5, 0.5]),
        ("ab", {A: (10,), B: (10, 5)}, {}, [10.5, 15.5]),
        # Without an encoder in reach, a host is worth nothing unless it has all.
        ("a", {A: (), B: (10,)}, {}, [0.5, 0.0]),
        ("a", {A: (), B: (10, 5)}, {}, [0.5, 15.0]),
        ("a", {A: (), B: (10,)}, {"a": "t", "b": "t"}, [0.5, 10.5]),
        ("-", {A: (10,), B: ()}, {}, [0.0, 0.0]),
    ],
)
def test_a_host_is_worth_what_it_has_if_the_rest_can_reach_it(
    encoders: str, found: dict[Host, tuple[int, ...]], tiers: dict[str, str], expected: list[float]
) -> None:
    choice, consumers = fleet(encoders, "ab", tiers)
    worth = choice.worth(
        attempt(2), {host.address: entries(*sizes) for host, sizes in found.items()}
    )

    assert worth is not None
    assert [worth(consumer) for consumer in consumers] == expected


def test_a_consumer_without_a_host_is_worth_nothing() -> None:
    choice, [_, unknown] = fleet("a", "a-", {})
    worth = choice.worth(attempt(1), {A.address: entries(10), B.address: {}})

    assert worth is not None
    assert worth(unknown) == 0.0


def test_all_consumers_are_the_same_without_a_look_up() -> None:
    choice, _ = fleet("a", "a", {})

    assert choice.worth(attempt(1), {}) is None
