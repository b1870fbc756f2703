"""Registry of the policies, and the policies in force with their options, in order of precedence.

A policy is found by its name: in this project, or among the entry points of other distributions. It
is written as its name and its options: `pd_only?skip_prefill_below_tokens=256`. The default of an
option is the setting of the same name, if there is one. If the instances are fixed, the policies
are checked against them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import entry_points
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl

import orjson
from pydantic import TypeAdapter, ValidationError

from epd.policies.plan import (
    Cost,
    Course,
    DecodeChoice,
    DecodeFrom,
    EncodeLocal,
    EncodePD,
    EncodePrefillDecode,
    Facts,
    PDOnly,
    Policy,
    PrefillDecode,
    PrefillLocalDecodeRemote,
)
from epd.routing.instances import ANSWERING, Role

GROUP = "epd.policies"
"""Entry points of this group are policies: dataclasses with a method `course`."""

OWN: Mapping[str, type[Policy]] = {
    "encode_prefill_decode": EncodePrefillDecode,
    "encode_pd": EncodePD,
    "encode_local": EncodeLocal,
    "prefill_decode": PrefillDecode,
    "pd_only": PDOnly,
    "cost": Cost,
    "prefill_local_decode_remote": PrefillLocalDecodeRemote,
}

MAX_POLICIES = 16
MAX_LENGTH = 1024
"""Maximum length of a written policy, in characters."""

Settings = Mapping[str, Any]


class PolicyInvalid(ValueError):
    """The text of a policy is invalid, or the policy cannot be used."""


def known_names() -> list[str]:
    """Return the names of all policies, this project's first."""
    others = {found.name for found in entry_points(group=GROUP)} - OWN.keys()
    return [*OWN, *sorted(others)]


def find_policy(name: str) -> type[Policy]:
    """Return the policy with this name.

    Raises:
        PolicyInvalid: there is no such policy, or it cannot be loaded.
    """
    if (own := OWN.get(name)) is not None:
        return own
    match list(entry_points(group=GROUP, name=name)):
        case [entry_point]:
            where = f"{name} ({entry_point.value})"
        case []:
            raise PolicyInvalid(f"there is no policy {name!r}; known: {', '.join(known_names())}")
        case several:
            brought = ", ".join(found.value for found in several)
            problem = f"{name} is provided by more than one distribution: {brought}"
            raise PolicyInvalid(f"{problem}; uninstall all but one")
    try:
        policy: Any = entry_point.load()
    except Exception as error:  # a third-party module may raise anything at its import
        raise PolicyInvalid(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(policy, type) and is_dataclass(policy) and hasattr(policy, "course"):
        return cast("type[Policy]", policy)
    raise PolicyInvalid(f"{where} is not a dataclass with a method course")


@dataclass(frozen=True, slots=True)
class Common:
    """The options of every policy."""

    decode_choice: DecodeChoice = "late"
    decode_from: DecodeFrom = "table"


class Active(NamedTuple):
    """A policy in force.

    Attributes:
        written: text of the policy.
        options: all options, for display.
    """

    written: str
    name: str
    policy: Policy
    common: Common
    options: Mapping[str, Any]

    @property
    def decides_by_kind(self) -> bool:
        """Whether a course depends only on the `kind` of the facts.

        False for a policy of another package, which may read any fact.
        """
        if isinstance(self.policy, PDOnly):
            return self.policy.skip_prefill_for_text  # else it counts tokens
        return type(self.policy) in OWN.values()

    def course(self, facts: Facts) -> Course | None:
        course = self.policy.course(facts)
        if course is None or (course.decode_from and course.decode_choice):
            return course
        return course._replace(
            decode_from=course.decode_from or self.common.decode_from,
            decode_choice=course.decode_choice or self.common.decode_choice,
        )


def choose_policy(policies: Iterable[Active], facts: Facts) -> tuple[str, Course] | None:
    """Return the course of a request, with the name of the first policy that applies to it."""
    named = None
    for policy in policies:
        if policy.common.decode_from != "table" and facts.roles.isdisjoint(ANSWERING):
            # A client or a picker names decode instances, so the table may have none.
            named = named or replace(
                facts, roles=facts.roles | {Role.DECODE}, measure=lambda: facts.prompt_tokens
            )
            course = policy.course(named)
        else:
            course = policy.course(facts)
        if course is not None:
            return policy.name, course
    return None


def activate(written: Sequence[str], settings: Settings) -> tuple[Active, ...]:
    """Return the policies of their texts, in order of precedence.

    The settings are the defaults of the options.

    Raises:
        PolicyInvalid: a text is invalid, or a policy cannot be used.
    """
    if not written:
        raise PolicyInvalid("at least one policy is needed")
    if len(written) > MAX_POLICIES:
        raise PolicyInvalid(f"at most {MAX_POLICIES} policies are allowed")
    found = tuple(_activated(text, settings) for text in written)
    names = [policy.name for policy in found]
    for name in names:
        if names.count(name) > 1:
            raise PolicyInvalid(f"{name} is named twice")
    return found


def _activated(written: str, settings: Settings) -> Active:
    name, given = _parsed(written)
    policy = find_policy(name)
    own, both = ([field.name for field in fields(cast("Any", kind))] for kind in (policy, Common))
    if unknown := sorted(given.keys() - {*own, *both}):
        raise PolicyInvalid(
            f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted([*own, *both]))}"
        )
    values = {option: settings[option] for option in (*own, *both) if option in settings} | given
    built = _built(name, policy, {option: values[option] for option in own if option in values})
    common = _built(name, Common, {option: values[option] for option in both if option in values})
    if common.decode_from == "picker" and not settings.get("decode_picker_url"):
        raise PolicyInvalid(f"{name}: decode_from=picker needs --decode-picker-url")
    options = {option: _shown(getattr(built, option)) for option in own}
    options |= {option: _shown(getattr(common, option)) for option in both}
    return Active(written, name, built, common, options)


def _shown(value: Any) -> Any:
    """Return an option's value as JSON, whatever type a third-party policy uses."""
    try:
        return orjson.loads(orjson.dumps(value, default=str))
    except TypeError:  # an integer beyond 64 bits
        return str(value)


def _parsed(written: str) -> tuple[str, dict[str, str]]:
    if len(written) > MAX_LENGTH:
        raise PolicyInvalid(f"the text of a policy has at most {MAX_LENGTH} characters")
    name, mark, query = written.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark))
    except ValueError:
        raise PolicyInvalid(f"{name}: options are written as ?name=value&name=value") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise PolicyInvalid(f"{name} has an option twice")
    return name, given


def _built(name: str, kind: type[Any], values: Mapping[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise PolicyInvalid(f"{name}: {where}{message}") from None


def check_suited(policies: Sequence[Active], roles: frozenset[Role], *, pushed: bool) -> None:
    """Reject policies that would fail all requests of a kind, with fixed roles of the instances.

    The check uses two sample requests: one of text, and one with a picture. `pushed` tells whether
    consumers wait for the encoder output of every item (`ECTransfer.pushed`).

    Raises:
        PolicyInvalid: the policies do not suit the fleet.
    """
    served = False
    for items in (0, 1):
        facts = Facts("/v1/chat/completions", prefills=True, items=items, roles=roles)
        decided = choose_policy(policies, facts)
        if decided is None:
            continue
        served, (name, course) = True, decided
        if items and course.encode and not course.local and Role.ENCODE not in roles:
            raise PolicyInvalid(f"{name} sends media to encode instances, but there are none")
        if items and pushed and (not course.encode or course.local or course.items is not None):
            skips = "skips" if not course.encode else "may skip"
            raise PolicyInvalid(
                f"{name} {skips} the encode stage, but with this --ec-transfer consumers wait for "
                "the encoder output of every item (--ec-consumer-zmq-addrs alone selects that "
                "transfer too)"
            )
    names = [policy.name for policy in policies]
    if not served and OWN.keys() >= set(names):  # others may need other facts
        raise PolicyInvalid(
            f"{', '.join(names)}: no request would be served, because there are only instances of "
            f"these roles: {', '.join(sorted(roles))}"
        )
