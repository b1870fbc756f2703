"""Configuration that changes at run time, and the components that follow it."""

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.proxy_config import FIXED, LiveConfig
from epd.edge.admission import Admission, FairQueue
from epd.errors import TooManyRequests, UpstreamUnreachable
from epd.routing.balance import Choice
from epd.routing.health import HealthPolicy, HealthState
from epd.routing.instances import Instance, InstanceSource, Registry, Role
from epd.routing.table import InstanceTable
from epd.tenants import Tenant

ALICE = Tenant("alice")
ONES = [Instance(Role.ENCODE, f"http://{name}") for name in "abcdef"]
some = st.lists(st.sampled_from(ONES), unique=True)


def config(**more: Any) -> ProxyConfig:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    return ProxyConfig.model_validate(urls | more)


def test_a_reload_does_not_change_the_previous_configuration() -> None:
    live = LiveConfig(config(max_items=1))
    before = live.current

    change = live.apply_config(config(max_items=2, eject_after=9))

    assert (live.current.max_items, live.current.health.eject_after) == (2, 9)
    assert (before.max_items, before.health.eject_after) == (1, config().eject_after)
    assert change.before is before
    assert change.changed == {"max_items", "eject_after"}
    assert not change.kept


def test_a_configuration_cannot_be_changed() -> None:
    frozen = LiveConfig(config()).current

    for name in ProxyConfig.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(frozen, name, 1)
        hash(getattr(frozen, name))  # nor a value of it


def test_followers_are_called_only_after_changes() -> None:
    live, told = LiveConfig(config()), list[tuple[int, int]]()
    live.add_follower(lambda new, before: told.append((new.max_items, before.max_items)))

    live.apply_config(config(port=1))
    live.apply_config(config(max_items=2))
    live.apply_config(config(max_items=2))

    assert told == [(2, config().max_items)]


def test_settings_that_need_a_restart_stay() -> None:
    live = LiveConfig(config())

    change = live.apply_config(config(port=1, workers=3, max_items=2))

    assert (live.current.port, live.current.workers, live.current.max_items) == (8000, 1, 2)
    assert (set(change.changed), set(change.kept)) == ({"max_items"}, {"port", "workers"})


def test_a_reload_can_add_and_remove_the_prefill_stage() -> None:
    live = LiveConfig(config())
    split = {"prefill_servers_urls": "http://p:1", "decode_servers_urls": "http://d:1"}

    change = live.apply_config(config(**split))

    assert change.kept == frozenset()
    assert [one.role for one in live.current.instances] == [Role.ENCODE, Role.PREFILL, Role.DECODE]

    live.apply_config(config())

    assert [one.role for one in live.current.instances] == [Role.ENCODE, Role.PREFILL_DECODE]


def test_a_reload_that_conflicts_with_fixed_settings_changes_nothing() -> None:
    live = LiveConfig(config())

    with pytest.raises(ConfigInvalid, match="api_keys_file cannot change without a restart"):
        live.apply_config(config(api_keys_file="/keys", tenant_max_requests=3, max_items=2))

    assert live.current == config()


def test_fixed_settings_are_fields() -> None:
    assert set(ProxyConfig.model_fields) >= FIXED


def test_a_kept_instance_keeps_its_health_and_a_removed_one_its_requests() -> None:
    a, b, c = ONES[:3]
    table = InstanceTable(policy=HealthPolicy(eject_after=1))
    registry = Registry(table, [a, b])
    with pytest.raises(UpstreamUnreachable), table.track_request(a):
        raise UpstreamUnreachable("x")

    with table.track_request(b):
        registry.replace(InstanceSource.CONFIG, [c, a])
        assert table.of_roles(Role.ENCODE) == (a, c)

    assert table.state(a) is not HealthState.HEALTHY
    assert not table.under_way


def test_health_is_judged_by_the_policy_of_now() -> None:
    table = InstanceTable(ONES[:2], HealthPolicy(eject_after=1))

    table.judge_by(HealthPolicy(eject_after=2))
    table.add(ONES[2])

    for one in ONES[:3]:
        with pytest.raises(UpstreamUnreachable), table.track_request(one):
            raise UpstreamUnreachable("x")
        assert table.state(one) is HealthState.HEALTHY


def test_a_choice_goes_by_another_balance_from_one_request_to_the_next() -> None:
    choice = Choice(InstanceTable(ONES), Role.ENCODE)
    assert len({choice.best_instance(balance="affinity", item="key") for _ in range(4)}) == 1

    assert [choice.best_instance(balance="round_robin", item="key") for _ in range(4)] == ONES[:4]


def test_queued_requests_are_admitted_when_the_limit_rises() -> None:
    door = FairQueue(1, 9)
    tickets = [door.enter_queue(ALICE) for _ in range(4)]

    door.resize(3, 9)
    assert [ticket.where for ticket in tickets] == ["inside"] * 3 + ["queue"]

    door.resize(1, 0)
    for ticket in tickets[:2]:
        door.leave_queue(ticket)
        assert tickets[3].where == "queue"
    door.leave_queue(tickets[2])
    assert (tickets[3].where, door.inside) == ("inside", 1)


async def test_limits_change_under_requests_that_are_here() -> None:
    limits = config(max_requests=9, max_queue=0, api_keys_file="/keys")
    admission = Admission(limits, asyncio.get_running_loop().time)
    one = limits.model_copy(update={"tenant_max_requests": 1, "tenant_requests_per_minute": 1})

    with admission.request(ALICE) as first, admission.request(ALICE) as second:
        first.enter_queue()
        admission.apply_config(one)
        with pytest.raises(TooManyRequests):
            second.enter_queue()
    with admission.request(ALICE) as third:
        third.enter_queue()
        admission.keep_pace(ALICE)
        with pytest.raises(TooManyRequests):
            admission.keep_pace(ALICE)
        admission.apply_config(one)  # the quota of this minute stays used up
        with pytest.raises(TooManyRequests):
            admission.keep_pace(ALICE)
        admission.apply_config(limits)
        admission.keep_pace(ALICE)


def test_a_changed_rate_keeps_the_time_at_which_a_bucket_is_full() -> None:
    admission = Admission(
        config(api_keys_file="/keys", tenant_requests_per_minute=1), lambda: 100.0
    )
    admission.keep_pace(ALICE)
    admission.apply_config(config(api_keys_file="/keys", tenant_requests_per_minute=2))

    with pytest.raises(TooManyRequests) as refused:
        admission.keep_pace(ALICE)
    assert refused.value.headers["Retry-After"] == "30"
