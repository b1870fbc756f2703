"""Registry: members as named by several sources, and the ranks behind one URL."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd.errors import UpstreamUnreachable
from epd.routing.health import HealthPolicy, HealthState
from epd.routing.instances import Instance, Role
from epd.routing.registry import CLASHES, Change, InstanceSource, Registry
from epd.routing.table import InstanceTable
from tests.examples import scaled

E1, E2 = (Instance(Role.ENCODE, f"http://e{number}:1") for number in (1, 2))
P, D = Instance(Role.PREFILL, "http://p:1"), Instance(Role.DECODE, "http://d:1")
PD = Instance(Role.PREFILL_DECODE, "http://pd:1")


class Told:
    """Instance table with its registry, and the reported changes."""

    def __init__(self, *configured: Instance) -> None:
        self.changes: list[tuple[Instance, Change, InstanceSource]] = []
        self.table = InstanceTable()
        self.registry = Registry(
            self.table, configured, on_change=lambda *change: self.changes.append(change)
        )

    @property
    def members(self) -> set[Instance]:
        return set(self.table.of_roles(*Role))

    @property
    def usable(self) -> list[Instance]:
        return [one.instance for one in self.table.usable_candidates(Role.ENCODE)]


def test_configured_instances_are_members_without_an_event() -> None:
    told = Told(E1, PD)

    assert told.members == {E1, PD}
    assert told.changes == []


def test_an_instance_of_two_sources_stays_until_both_remove_it() -> None:
    told = Told()
    told.registry.replace(InstanceSource.API, [E1])
    told.registry.replace(InstanceSource.DNS, [E1])
    told.registry.replace(InstanceSource.API, [])
    assert told.members == {E1}
    told.registry.replace(InstanceSource.DNS, [])

    assert told.members == set()
    assert told.changes == [(E1, "added", InstanceSource.API), (E1, "removed", InstanceSource.DNS)]


def test_a_conflicting_instance_is_refused_until_the_member_leaves() -> None:
    told = Told()
    told.registry.replace(InstanceSource.API, [PD])
    told.registry.replace(InstanceSource.FILE, [D, P])
    told.registry.replace(InstanceSource.FILE, [D, P])
    assert told.members == {PD}
    assert told.registry.conflicting_member(D) == PD
    told.registry.replace(InstanceSource.API, [])

    assert told.members == {D, P}
    assert [change for one, change, _ in told.changes if one == D] == ["refused", "added"]


def test_one_url_cannot_prefill_and_decode_apart_but_may_encode_beside() -> None:
    told = Told(Instance(Role.ENCODE, "http://x:1"), Instance(Role.PREFILL, "http://x:1"))

    assert len(told.members) == 2
    assert told.registry.conflicting_member(Instance(Role.DECODE, "http://x:1")) is not None


def test_other_details_are_another_instance_and_the_first_source_counts() -> None:
    wide = Instance(Role.PREFILL_DECODE, PD.url, dp_size=4)
    told = Told()
    told.registry.replace(InstanceSource.DNS, [PD])
    told.registry.replace(InstanceSource.API, [wide])

    assert told.members == {wide}
    [member] = told.registry.members
    assert member.sources == (InstanceSource.API, InstanceSource.DNS)


def test_a_changed_weight_keeps_health_and_load_of_the_instance() -> None:
    told = Told(E1, E2)
    told.table.probes_due()
    told.table.record_probe(E1, well=True)
    for _ in range(3):
        told.table.record_probe(E1, well=False)
    with told.table.track_request(E1):
        told.registry.replace(InstanceSource.CONFIG, [replace(E1, weight=3.0), E2])

        assert told.table.load(E1).weight == 3.0
        assert told.table.under_way == {replace(E1, weight=3.0): 1}
        assert told.usable == [E2]
        told.table.record_probe(E1, well=True)  # sent before the change, answered after it
        assert told.table.state(E1) is HealthState.TRIAL
    assert told.table.of_roles(Role.ENCODE) == (replace(E1, weight=3.0), E2)
    assert {one.instance.weight for one in told.registry.members} == {1.0, 3.0}
    assert told.changes == []


def test_an_instance_added_again_starts_with_new_health() -> None:
    told = Told(E1, E2)
    for _ in range(3):
        told.table.record_probe(E1, well=False)
    assert told.usable == [E2]
    told.registry.replace(InstanceSource.CONFIG, [E2])
    told.registry.replace(InstanceSource.CONFIG, [E1, E2])

    assert set(told.usable) == {E1, E2}


INSTANCES = st.builds(
    Instance,
    st.sampled_from(Role),
    st.sampled_from([f"http://{name}:1" for name in "abc"]),
    st.integers(1, 2),
)


class RegistryMachine(RuleBasedStateMachine):
    """State machine: sources name any instances, and the table follows the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.said: dict[InstanceSource, Sequence[Instance]] = {}
        self.before: set[Instance] = set()

    @rule(source=st.sampled_from(InstanceSource), instances=st.lists(INSTANCES, max_size=4))
    def says(self, source: InstanceSource, instances: list[Instance]) -> None:
        self.before = self.told.members
        self.said[source] = instances
        self.told.registry.replace(source, instances)

    @property
    def named(self) -> dict[tuple[Role, str], Instance]:
        named: dict[tuple[Role, str], Instance] = {}
        for source in InstanceSource:
            for one in self.said.get(source, ()):
                named.setdefault((one.role, one.url), one)
        return named

    @invariant()
    def only_named_instances_are_members(self) -> None:
        assert self.told.members <= set(self.named.values())

    @invariant()
    def roles_that_clash_never_take_part_together(self) -> None:
        roles = {one.role for one in self.told.members}
        assert not any(CLASHES[role] & roles for role in roles)

    @invariant()
    def named_instances_stay_members(self) -> None:
        assert self.before & set(self.named.values()) <= self.told.members

    @invariant()
    def a_named_non_member_conflicts_with_a_member(self) -> None:
        for one in set(self.named.values()) - self.told.members:
            assert self.told.registry.conflicting_member(one) is not None

    @invariant()
    def reported_changes_add_up(self) -> None:
        counts = Counter[Instance]()
        for instance, change, _ in self.told.changes:
            counts[instance] += {"added": 1, "removed": -1, "refused": 0}[change]
        assert {one for one, count in counts.items() if count} == self.told.members
        assert set(counts.values()) <= {0, 1}

    @invariant()
    def every_member_has_a_source_that_names_it(self) -> None:
        for instance, sources, _ in self.told.registry.members:
            assert sources
            for source in sources:
                assert instance.url in {one.url for one in self.said[source]}


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=scaled(40))


@pytest.mark.parametrize(
    ("role", "rank"), [(Role.PREFILL_DECODE, 0), (Role.PREFILL, 0), (Role.DECODE, None)]
)
def test_a_consumers_requests_name_a_rank(role: Role, rank: int | None) -> None:
    instance = Instance(role, "http://x:1", dp_size=2)
    with InstanceTable([instance]).track_request(instance) as use:
        assert use.rank == rank


def test_a_request_goes_to_the_rank_of_its_reserved_place() -> None:
    first = Instance(Role.PREFILL, "http://x:1", dp_size=4)
    table = InstanceTable([first])
    taken = [table.reserve_place(first) for _ in range(3)]
    with taken[2]:
        assert table.under_way == {first: 1}
    assert table.under_way == {}

    with (
        table.track_request(first, rank=taken[2].rank) as use,
        table.track_request(first) as next_one,
    ):
        assert (use.rank, next_one.rank) == (2, 3)


def test_the_load_of_ranks_counts_places() -> None:
    instance = Instance(Role.PREFILL, "http://x:1", dp_size=2)
    table = InstanceTable([instance])
    with table.reserve_place(instance) as one, table.reserve_place(instance) as other:
        assert {one.rank, other.rank} == {0, 1}
        with table.reserve_place(instance) as third, table.reserve_place(instance) as fourth:
            assert {third.rank, fourth.rank} == {0, 1}


def test_a_kept_instance_keeps_its_health_and_a_removed_one_its_requests() -> None:
    a, b, c = (Instance(Role.ENCODE, f"http://{name}") for name in "abc")
    table = InstanceTable(policy=HealthPolicy(eject_after=1))
    registry = Registry(table, [a, b])
    with pytest.raises(UpstreamUnreachable), table.track_request(a):
        raise UpstreamUnreachable("x")

    with table.track_request(b):
        registry.replace(InstanceSource.CONFIG, [c, a])
        assert table.of_roles(Role.ENCODE) == (a, c)

    assert table.state(a) is not HealthState.HEALTHY
    assert not table.under_way
