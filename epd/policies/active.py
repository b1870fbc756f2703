"""Policies in force: each with its options, in order of priority.

One is written as its name and its options, `pd_only?skip_prefill_below_tokens=256`. An option that
is not written has the value of the setting of the same name, where there is one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl

import orjson
from pydantic import TypeAdapter, ValidationError

from epd.policies.catalogue import PolicyInvalid, find
from epd.policies.course import Course, DecodeChoice, DecodeFrom, Facts, Policy
from epd.routing.instances import ANSWERING, Role

MAX_POLICIES = 16
MAX_LENGTH = 1024
"""Characters of one, as it is written."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every policy has.

    Attributes:
        decode_choice: when the decode instance is chosen.
        decode_from: who names it.
    """

    decode_choice: DecodeChoice = "late"
    decode_from: DecodeFrom = "table"


class Active(NamedTuple):
    """One that is in force.

    Attributes:
        written: as it is written.
        name: its name.
        policy: it.
        common: the options that every policy has.
        options: all of its options, for people to read.
    """

    written: str
    name: str
    policy: Policy
    common: Common
    options: Mapping[str, Any]

    def course(self, facts: Facts) -> Course | None:
        """What it has to say of a request."""
        course = self.policy.course(facts)
        if course is None or (course.decode_from and course.decode_choice):
            return course
        return Course(
            course.encode,
            course.prefill,
            course.prefill_url,
            course.decode_from or self.common.decode_from,
            course.decode_choice or self.common.decode_choice,
        )


def decide(policies: Iterable[Active], facts: Facts) -> tuple[str, Course] | None:
    """What runs for a request, and by which policy: the first that has something to say of it."""
    named = None
    for one in policies:
        if one.common.decode_from != "table" and facts.roles.isdisjoint(ANSWERING):
            # Somebody else knows of decode instances: that the table has none means nothing.
            named = named or replace(
                facts, roles=facts.roles | {Role.DECODE}, measure=lambda: facts.prompt_tokens
            )
            course = one.course(named)
        else:
            course = one.course(facts)
        if course is not None:
            return one.name, course
    return None


def activate(written: Sequence[str], settings: Settings) -> tuple[Active, ...]:
    """Policies as they are written, the first one's word before the next one's.

    Args:
        written: each of them.
        settings: values of options that are not written.

    Raises:
        PolicyInvalid: one of them is none, or cannot be used.
    """
    if not written:
        raise PolicyInvalid("there must be a policy")
    if len(written) > MAX_POLICIES:
        raise PolicyInvalid(f"there may be {MAX_POLICIES} policies")
    found = tuple(_activated(one, settings) for one in written)
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise PolicyInvalid(f"{name} is named twice")
    return found


def _activated(written: str, settings: Settings) -> Active:
    name, given = _parsed(written)
    policy = find(name)
    own, both = ([field.name for field in fields(cast("Any", it))] for it in (policy, Common))
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
    """An option as JSON can say it, whatever kind a policy of others has it be."""
    try:
        return orjson.loads(orjson.dumps(value, default=str))
    except TypeError:  # an integer of many digits
        return str(value)


def _parsed(written: str) -> tuple[str, dict[str, str]]:
    if len(written) > MAX_LENGTH:
        raise PolicyInvalid(f"a policy is written in {MAX_LENGTH} characters at most")
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
