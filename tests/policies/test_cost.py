"""Policy `cost`: which items stay with their consumer, and what that gains."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import epd
from epd.policies.builtin import Cost
from epd.policies.policy import Course, Facts, ItemFacts, ItemPlace
from epd.policies.registry import make_policies
from epd.routing.instances import Role
from tests.support.encode_fleet import EncodeFleet, traffic

CHAT = "/v1/chat/completions"
ALWAYS_LOCAL = Cost(encode_below_pixels=2**40)

IDLE = ItemFacts(
    modality="image",
    pixels=1_000_000,
    tokens=1000,
    stored=True,
    encode_s=0.15,
    own_s=0.1,
    consumer_queue_s=0.0,
    consumer_requests=0,
)
SECONDS = st.floats(0, 1000)
FACTS = st.builds(
    ItemFacts,
    st.sampled_from(["image", "audio", "video"]),
    st.integers(0, 2**40),
    st.integers(1, 100_000),
    st.booleans(),
    st.none() | SECONDS,
    SECONDS,
    SECONDS,
    st.floats(0, 1000),
)
RULES = st.builds(Cost, st.just(0) | st.integers(1, 2**40))


def placed(policy: Cost, about: ItemFacts = IDLE, **more: Any) -> tuple[str, str]:
    return policy.place_item(replace(about, **more)).labels


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ("local", "cheaper")),
        ({"encode_s": 0.1}, ("local", "cheaper")),
        ({"consumer_requests": 1}, ("encode", "cheaper")),
        ({"consumer_requests": 1, "own_s": 0.01}, ("local", "cheaper")),
        ({"consumer_queue_s": 0.1}, ("encode", "cheaper")),
        ({"encode_s": 5.0, "consumer_requests": 1}, ("local", "cheaper")),
        ({"encode_s": None}, ("encode", "unmeasured")),
        ({"stored": False}, ("encode", "unsaved")),
    ],
)
def test_item_goes_where_the_delays_are_shorter(
    more: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert placed(Cost(), **more) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"pixels": 999}, ("local", "below_pixels")),
        ({"pixels": 999, "consumer_requests": 50}, ("local", "below_pixels")),
        ({"pixels": 999, "encode_s": None}, ("local", "below_pixels")),
        ({"pixels": 1000}, ("encode", "above_pixels")),
        ({"pixels": 0}, ("encode", "unknown_size")),
        ({"pixels": 0, "modality": "video"}, ("encode", "unknown_size")),
        ({"pixels": 999, "stored": False}, ("encode", "unsaved")),
    ],
)
def test_static_form_depends_only_on_pixels(
    more: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert placed(Cost(encode_below_pixels=1000), **more) == expected


@given(RULES, FACTS)
def test_unsaved_items_never_stay(policy: Cost, about: ItemFacts) -> None:
    assert not policy.place_item(about).at_consumer or about.stored


@given(RULES, FACTS, SECONDS, SECONDS)
def test_a_longer_encode_queue_never_attracts_an_item(
    policy: Cost, about: ItemFacts, one: float, other: float
) -> None:
    short, long = (replace(about, encode_s=seconds) for seconds in sorted((one, other)))

    assert policy.place_item(short).at_consumer <= policy.place_item(long).at_consumer


@given(RULES, FACTS, st.floats(0, 1000), st.floats(0, 1000))
def test_busier_consumer_never_attracts_an_item(
    policy: Cost, about: ItemFacts, one: float, other: float
) -> None:
    idle, busy = (replace(about, consumer_requests=count) for count in sorted((one, other)))

    assert policy.place_item(busy).at_consumer <= policy.place_item(idle).at_consumer


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({Role.ENCODE, Role.PREFILL, Role.DECODE}, (True, True)),
        ({Role.ENCODE, Role.PREFILL_DECODE}, (True, False)),
        ({Role.ENCODE, Role.PREFILL}, None),
    ],
)
@pytest.mark.parametrize("items", [0, 1])
def test_stages_are_those_of_the_usual_policies(
    roles: set[Role], expected: tuple[bool, bool] | None, items: int
) -> None:
    policy = Cost()
    course = policy.course(Facts(CHAT, prefills=True, items=items, roles=frozenset(roles)))

    assert course == (None if expected is None else Course(*expected, items=policy))


URLS: dict[str, Any] = {
    "encode_servers_urls": ("http://e:1",),
    "decode_servers_urls": ("http://d:1",),
}


def test_encode_below_pixels_puts_the_policy_before_the_usual_ones() -> None:
    config = epd.ProxyConfig(**URLS, encode_below_pixels=5000)

    assert config.policies == ("cost", "encode_prefill_decode", "encode_pd")


def test_encode_below_pixels_is_the_policys_option() -> None:
    made = make_policies(["cost"], {"encode_below_pixels": 5000})

    assert made == {"cost": Cost(encode_below_pixels=5000)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encode_below_pixels": -1}, "greater than or equal to 0"),
        (
            {
                "encode_below_pixels": 9,
                "local_prefill_url": "http://p:1",
                "prefill_servers_urls": ("http://p:1",),
            },
            "exclude each other",
        ),
        ({"encode_below_pixels": 9, "encode_servers_urls": ()}, "but there are none"),
        (
            {
                "policies": "cost",
                "ec_transfer": "mooncake",
                "ec_consumer_zmq_addrs": "tcp://d:1",
            },
            "cost may skip the encode stage",
        ),
    ],
)
def test_settings_that_cannot_hold_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="validation error") as rejected:
        epd.ProxyConfig(**URLS | settings)

    assert message in str(rejected.value)


SMALL, LARGE = 64, 4096
QUIET = traffic(rate=2, count=600, tokens=[SMALL], decode_s=0.3)
"""Small pictures, idle decoders."""
BUSY = traffic(rate=2, count=600, tokens=[LARGE, 0, 0, 0], decode_s=8)
"""Large pictures among text, busy decoders."""
MIXED = traffic(rate=8, count=2000, tokens=[SMALL, SMALL, LARGE, 0], decode_s=2)


@pytest.mark.parametrize("requests", [QUIET, BUSY, MIXED], ids=["quiet", "busy", "mixed"])
def test_cost_policy_is_as_fast_as_always_and_never_encoding(requests: Any) -> None:
    always, never, cost = (EncodeFleet(rule).run(requests) for rule in (None, ALWAYS_LOCAL, Cost()))

    pictures = sum(asked.tokens > 0 for asked in requests)
    assert never.left == pictures
    assert always.left <= 0.01 * pictures  # in bursts that no encode instance can finish in time
    assert cost.mean_s <= 1.02 * min(always.mean_s, never.mean_s)


def test_cost_is_faster_than_both_in_a_mix() -> None:
    always, never, cost = (EncodeFleet(rule).run(MIXED) for rule in (None, ALWAYS_LOCAL, Cost()))

    assert cost.mean_s < 0.9 * min(always.mean_s, never.mean_s)
    assert 0 < cost.left < never.left


class Soonest:
    """Rule that compares costs and leaves no item to a consumer."""

    def place_item(self, facts: ItemFacts) -> ItemPlace:
        return ItemPlace(at_consumer=False, reason="cheaper", soonest=True)


def test_balance_chooses_the_encode_instance_unless_costs_are_compared() -> None:
    static, compared = (
        EncodeFleet(rule, encoders=2).run(MIXED).place_item(LARGE)
        for rule in (Cost(encode_below_pixels=1), Soonest())
    )

    assert (static.place, static.first_url) == ((False, "above_pixels", False), None)
    assert (compared.place, compared.at_consumer) == ((False, "cheaper", True), False)
    assert compared.first_url in {"http://e0:1", "http://e1:1"}
