"""Coordination policies by name, with their options, and the choice among those in force.

A policy is found by its name: in this project, or among the entry points of other distributions.
Its options are the settings of the same names. If the instances are fixed, the policies are checked
against them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any

from epd.policies.builtin import (
    Cost,
    EncodeLocal,
    EncodePD,
    EncodePrefillDecode,
    PDOnly,
    PrefillDecode,
    PrefillLocalDecodeRemote,
)
from epd.policies.policy import Course, Facts, Policy
from epd.routing.instances import Role

GROUP = "epd.policies"
"""Entry points of this group are policies: dataclasses with a method `course`."""

BUILTIN: Mapping[str, type[Policy]] = {
    "encode_prefill_decode": EncodePrefillDecode,
    "encode_pd": EncodePD,
    "encode_local": EncodeLocal,
    "prefill_decode": PrefillDecode,
    "pd_only": PDOnly,
    "cost": Cost,
    "prefill_local_decode_remote": PrefillLocalDecodeRemote,
}


class PolicyInvalid(ValueError):
    """Error: there is no such policy, or it cannot be used."""


def make_policies(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, Policy]:
    """Return the policies with these names, with the settings as their options.

    Raises:
        PolicyInvalid: a policy is unknown, named twice, or cannot be used.
    """
    made: dict[str, Policy] = {}
    for name in names:
        if name in made:
            raise PolicyInvalid(f"{name} is named twice")
        policy = find_policy(name)
        options = {field.name for field in fields(policy)} & settings.keys()
        try:
            made[name] = policy(**{option: settings[option] for option in options})
        except (TypeError, ValueError) as error:
            raise PolicyInvalid(f"{name}: {error}") from None
    return made


def find_policy(name: str) -> Any:
    """Return the class of the policy with this name.

    Raises:
        PolicyInvalid: there is no such policy, or it cannot be loaded.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    match list(entry_points(group=GROUP, name=name)):
        case [entry_point]:
            where = f"{name} ({entry_point.value})"
        case []:
            others = {found.name for found in entry_points(group=GROUP)} - BUILTIN.keys()
            known = ", ".join([*BUILTIN, *sorted(others)])
            raise PolicyInvalid(f"there is no policy {name!r}; known: {known}")
        case several:
            providers = ", ".join(found.value for found in several)
            problem = f"{name} is provided by more than one distribution: {providers}"
            raise PolicyInvalid(f"{problem}; uninstall all but one")
    try:
        policy: Any = entry_point.load()
    except Exception as error:  # a third-party module may raise anything at its import
        raise PolicyInvalid(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(policy, type) and is_dataclass(policy) and hasattr(policy, "course"):
        return policy
    raise PolicyInvalid(f"{where} is not a dataclass with a method course")


class Policies:
    """Policies in force, in order of precedence."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies

    def choose_policy(self, facts: Facts) -> tuple[str, Course] | None:
        """Return the first policy that applies to a request, with its course; None without one."""
        for name, policy in self._policies.items():
            if (course := policy.course(facts)) is not None:
                return name, course
        return None

    def check_suited(self, roles: frozenset[Role], *, pushed: bool) -> None:
        """Reject policies that would fail all requests of a kind, with fixed roles of instances.

        The check uses two sample requests: one of text, and one with a picture. `pushed` tells
        whether consumers wait for the encoder output of every item (`ECTransfer.pushed`).

        Raises:
            PolicyInvalid: the policies do not suit the fleet.
        """
        served = False
        for items in (0, 1):
            facts = Facts("/v1/chat/completions", prefills=True, items=items, roles=roles)
            decided = self.choose_policy(facts)
            if decided is None:
                continue
            served, (name, course) = True, decided
            if items and course.encode and not course.consumer_encodes and Role.ENCODE not in roles:
                raise PolicyInvalid(f"{name} sends media to encode instances, but there are none")
            if (
                items
                and pushed
                and (not course.encode or course.consumer_encodes or course.items is not None)
            ):
                skips = "skips" if not course.encode else "may skip"
                raise PolicyInvalid(
                    f"{name} {skips} the encode stage, but with this --ec-transfer consumers wait "
                    "for the encoder output of every item (--ec-consumer-zmq-addrs alone selects "
                    "that transfer too)"
                )
        if not served and BUILTIN.keys() >= self._policies.keys():  # others may need other facts
            raise PolicyInvalid(
                f"{', '.join(self._policies)}: no request would be served, because there are only "
                f"instances of these roles: {', '.join(sorted(roles))}"
            )
