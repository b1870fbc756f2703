"""Coordination policies: the decision of each for each request, by name, in order of priority."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import epd
from epd.config.proxy_config import make_checked_policies
from epd.policies.policy import Course, Facts
from epd.policies.registry import BUILTIN, Policies, PolicyInvalid, find_policy, make_policies
from epd.routing.instances import Role

EPD = frozenset({Role.ENCODE, Role.PREFILL, Role.DECODE})
E_PD = frozenset({Role.ENCODE, Role.PREFILL_DECODE})
PD = frozenset({Role.PREFILL, Role.DECODE})
ONE = frozenset({Role.PREFILL_DECODE})
NOBODY = frozenset({Role.ENCODE, Role.PREFILL})

LOCAL = {"local_prefill_url": "http://p:1"}
SETTINGS = LOCAL | {"skip_prefill_below_tokens": 10}

SOME_ROLES = st.frozensets(st.sampled_from(Role))
SOME_FACTS = st.builds(
    Facts,
    st.just("/v1/chat/completions"),
    st.booleans(),
    st.integers(0, 3),
    SOME_ROLES,
    st.integers(0, 20).map(lambda size: lambda: size),
)


def facts(
    roles: frozenset[Role], items: int = 0, tokens: int = 100, *, prefills: bool = True
) -> Facts:
    return Facts("/v1/chat/completions", prefills, items, roles, lambda: tokens)


def course(policy: str, about: Facts, **settings: Any) -> Course | None:
    decided = Policies(make_policies([policy], SETTINGS | settings)).choose_policy(about)
    return None if decided is None else decided[1]


@pytest.mark.parametrize(
    ("policy", "roles", "runs"),
    [
        ("encode_prefill_decode", EPD, (True, True)),
        ("encode_prefill_decode", E_PD, None),
        ("encode_prefill_decode", NOBODY, None),
        ("encode_pd", E_PD, (True, False)),
        ("encode_pd", EPD, None),
        ("prefill_decode", EPD, (False, True)),
        ("prefill_decode", PD, (False, True)),
        ("prefill_decode", ONE, (False, False)),
        ("prefill_decode", NOBODY, None),
        ("prefill_local_decode_remote", EPD, (True, True)),
        ("prefill_local_decode_remote", PD, (False, True)),
        ("prefill_local_decode_remote", E_PD, None),
        ("pd_only", EPD, None),
    ],
)
def test_a_policy_uses_the_present_instances(
    policy: str, roles: frozenset[Role], runs: tuple[bool, bool] | None
) -> None:
    said = course(policy, facts(roles, items=1))

    assert (None if said is None else (said.encode, said.prefill)) == runs


@pytest.mark.parametrize(
    ("items", "tokens", "settings", "skips"),
    [
        (0, 9, {}, True),
        (0, 10, {}, False),
        (1, 9, {}, False),
        (0, 10_000, {"skip_prefill_for_text": True}, True),
        (1, 1, {"skip_prefill_for_text": True}, False),
    ],
)
def test_short_prompts_and_texts_skip_prefill(
    items: int, tokens: int, settings: dict[str, Any], skips: bool
) -> None:
    said = course("pd_only", facts(EPD, items, tokens), **settings)

    assert said == (Course(False, False) if skips else None)


def test_requests_that_prefill_cannot_serve_skip_it() -> None:
    for policy in ("encode_prefill_decode", "prefill_decode", "prefill_local_decode_remote"):
        said = course(policy, facts(EPD, prefills=False))

        assert said is not None
        assert not said.prefill


def test_the_local_prefill_instance_is_the_only_one() -> None:
    said = course("prefill_local_decode_remote", facts(PD))

    assert said is not None
    assert said.prefill_url == "http://p:1"


@given(st.permutations(list(BUILTIN)), SOME_FACTS)
def test_the_first_policy_with_a_decision_decides(names: list[str], about: Facts) -> None:
    policies = make_policies(names, SETTINGS)
    said = [name for name, policy in policies.items() if policy.course(about) is not None]
    decided = Policies(policies).choose_policy(about)

    assert (None if decided is None else decided[0]) == (said[0] if said else None)


@given(SOME_ROLES.filter(lambda roles: not roles >= {Role.DECODE, Role.PREFILL_DECODE}), st.data())
def test_at_most_one_policy_of_the_topologies_applies(
    roles: frozenset[Role], data: st.DataObject
) -> None:
    about = facts(roles, prefills=data.draw(st.booleans()))
    said = [course(name, about) for name in ("encode_prefill_decode", "encode_pd")]

    assert said.count(None) >= 1


def test_prompts_are_measured_once_and_only_for_policies_that_need_it() -> None:
    measured = 0

    def measure() -> int:
        nonlocal measured
        measured += 1
        return 5

    about = Facts("/v1/chat/completions", True, 0, NOBODY | {Role.DECODE}, measure)
    assert Policies(make_policies(["encode_prefill_decode"], {})).choose_policy(about) is not None
    assert measured == 0
    policies = make_policies(["pd_only", "encode_prefill_decode"], SETTINGS)
    assert Policies(policies).choose_policy(about) is not None
    assert about.prompt_tokens == 5
    assert measured == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nothing"], "there is no policy 'nothing'; known: encode_prefill_decode, encode_pd"),
        (["encode_pd", "encode_pd"], "encode_pd is named twice"),
        (["pd_only"], "pd_only: does nothing without skip_prefill_below_tokens"),
        (["prefill_local_decode_remote"], "needs local_prefill_url"),
    ],
)
def test_an_invalid_policy_is_rejected_with_the_reason(names: list[str], message: str) -> None:
    with pytest.raises(PolicyInvalid, match=re.escape(message)):
        make_policies(names, {})


URLS: dict[str, Any] = {
    "encode_servers_urls": ("http://e:1",),
    "decode_servers_urls": ("http://d:1",),
}
P = {"prefill_servers_urls": ("http://p:1", "http://p:2")}


@pytest.mark.parametrize(
    "settings",
    [
        {"policies": ("pd_only",), "skip_prefill_for_text": True},
        {"policies": ("encode_prefill_decode",), "instances_file": "instances.yaml"},
        {"policies": ("encode_prefill_decode",), "discover_prefill": ("p:1",)},
    ],
    ids=["some requests", "others in a file", "others by name"],
)
def test_policies_that_may_serve_something_are_not_refused(settings: dict[str, Any]) -> None:
    apart = {"discover_decode": ("d:1",), "decode_servers_urls": ()}
    urls = URLS | (apart if "discover_prefill" in settings else {})

    assert epd.ProxyConfig(**urls, **settings).policies == settings["policies"]


@pytest.mark.parametrize(
    ("settings", "policies"),
    [
        ({}, ("encode_prefill_decode", "encode_pd")),
        ({"policies": "prefill_decode, encode_pd"}, ("prefill_decode", "encode_pd")),
        (
            {"skip_prefill_below_tokens": 8},
            ("pd_only", "encode_prefill_decode", "encode_pd"),
        ),
        (
            P | {"local_prefill_url": "http://p:2"},
            ("prefill_local_decode_remote", "encode_prefill_decode", "encode_pd"),
        ),
    ],
)
def test_policies_in_force_are_those_of_the_configuration(
    settings: dict[str, Any], policies: tuple[str, ...]
) -> None:
    assert epd.ProxyConfig(**URLS | settings).policies == policies


def test_the_local_prefill_instance_is_the_first_one_by_default() -> None:
    config = epd.ProxyConfig(**URLS, **P, policies=("prefill_local_decode_remote",))
    decided = make_checked_policies(config).choose_policy(facts(PD))

    assert decided is not None
    assert decided[1].prefill_url == "http://p:1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_prefill_url": "http://x:1"}, "must be one of --prefill-servers-urls"),
        ({"decode_header": "a b"}, "is not the name of a header"),
        ({"skip_prefill_below_tokens": 2**31}, "less than or equal to 2147483647"),
        ({"conversation_ttl": 1e17}, "less than or equal to 2592000"),
        ({"decode_hosts": "10.0.0.0/99"}, "is not a host name"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="validation error") as refused:
        epd.ProxyConfig(**URLS | settings)

    assert message in str(refused.value)


def test_no_decode_instance_is_needed_where_others_name_it() -> None:
    settings = {"encode_servers_urls": ("http://e:1",), "prefill_servers_urls": ("http://p:1",)}

    epd.ProxyConfig(**settings, decode_from="header", decode_hosts="10.0.0.0/8")
    with pytest.raises(ValueError, match="--decode-hosts is required"):
        epd.ProxyConfig(**settings, decode_from="header")
    with pytest.raises(ValueError, match="--decode-servers-urls is required"):
        epd.ProxyConfig(**settings, decode_hosts="10.0.0.0/8")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a distribution with policies, as an installer writes it."""
    (tmp_path / "night_shift.py").write_text(PLUGIN)
    (tmp_path / "broken_shift.py").write_text("raise RuntimeError('no licence')\n")
    info = tmp_path / "night_shift-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: night-shift\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[epd.policies]\n"
        "night_shift = night_shift:NightShift\n"
        "no_policy = night_shift:FEW\n"
        "gone = night_shift:Gone\n"
        "unset = night_shift:Unset\n"
        "broken = broken_shift:Policy\n"
        "encode_pd = night_shift:NightShift\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


PLUGIN = """
from dataclasses import dataclass

from epd.policies.policy import Course, Facts

FEW = 2


@dataclass(frozen=True)
class NightShift:
    max_items: int = 99
    most_items: int = FEW

    def course(self, facts: Facts) -> Course | None:
        few = facts.items <= min(self.most_items, self.max_items)
        return Course(prefill=False) if few else None


@dataclass(frozen=True)
class Unset:
    most: int

    course = NightShift.course
"""


def test_a_policy_of_another_distribution_is_found_by_name(plugins: Path) -> None:
    config = epd.ProxyConfig(**URLS, policies=("night_shift", "encode_pd"))
    policies = make_checked_policies(config)

    assert policies.choose_policy(facts(E_PD, items=2)) == ("night_shift", COURSE)
    assert policies.choose_policy(facts(E_PD, items=3)) == ("encode_pd", COURSE)


def test_a_field_of_such_a_policy_has_the_setting_of_its_name(plugins: Path) -> None:
    config = epd.ProxyConfig(**URLS, policies=("night_shift", "encode_pd"), max_items=1)
    decided = make_checked_policies(config).choose_policy(facts(E_PD, items=2))

    assert decided == ("encode_pd", COURSE)


COURSE = Course(True, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "broken (broken_shift:Policy) cannot be loaded: RuntimeError: no licence"),
        ("gone", "gone (night_shift:Gone) cannot be loaded: AttributeError"),
        ("unset", "unset: Unset.__init__() missing 1 required positional argument: 'most'"),
        ("no_policy", "no_policy (night_shift:FEW) is not a dataclass with a method course"),
    ],
)
def test_a_broken_one_is_an_error_of_the_configuration(
    plugins: Path, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match="validation error") as refused:
        epd.ProxyConfig(**URLS, policies=(name,))

    assert message in str(refused.value)


def test_a_plugin_cannot_take_the_name_of_a_builtin_policy(plugins: Path) -> None:
    assert find_policy("encode_pd") is BUILTIN["encode_pd"]


def test_two_distributions_with_one_name_are_refused(plugins: Path) -> None:
    info = plugins / "day_shift-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: day-shift\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[epd.policies]\nnight_shift = day_shift:DayShift\n")

    with pytest.raises(PolicyInvalid, match="more than one distribution: "):
        find_policy("night_shift")
