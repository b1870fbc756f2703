"""Which target may use the outputs that were made for an earlier one."""

from epd.request.attempt import Target
from epd.routing.instances import Instance, Role
from epd.routing.reports import Host
from epd.routing.table import InstanceTable

PD = Instance(Role.PREFILL_DECODE, "http://pd:1")
DECODE = Instance(Role.DECODE, "http://d:1")
TABLE = InstanceTable([PD, DECODE])
CONSUMER, READER = TABLE.reserve_place(PD), TABLE.reserve_place(DECODE)
A, B = Host("shm+tcp://a:1", "a"), Host("shm+tcp://b:1", "b")


def test_a_consumer_uses_outputs_in_its_own_place_alone() -> None:
    earlier = Target(CONSUMER, namespace="n", host=A)

    assert earlier.with_outputs_of(earlier) == earlier
    for other in (Target(CONSUMER, namespace="n", host=B), Target(CONSUMER, namespace="m", host=A)):
        assert other.with_outputs_of(earlier) is None
    assert earlier._replace(pushed=True).with_outputs_of(earlier) is None


def test_outputs_stay_on_their_host_while_an_attempt_has_no_consumer() -> None:
    earlier = Target(CONSUMER, namespace="n", host=A)
    between = Target(READER, namespace="n").with_outputs_of(earlier)

    assert between is not None
    assert between.first is READER
    assert earlier.with_outputs_of(between) == earlier
    assert Target(CONSUMER, namespace="n").with_outputs_of(between) is None
    assert Target(READER, namespace="m").with_outputs_of(earlier) is None
