"""All policies by name: those of this project, and those of other distributions."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, cast

from epd.policies.conditional import PDOnly
from epd.policies.course import Policy
from epd.policies.local import PrefillLocalDecodeRemote
from epd.policies.stages import EncodePD, EncodePrefillDecode, PrefillDecode

GROUP = "epd.policies"
"""Entry points of this group are policies: dataclasses with a method `course`."""

OWN: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "encode_prefill_decode": EncodePrefillDecode,
        "encode_pd": EncodePD,
        "prefill_decode": PrefillDecode,
        "pd_only": PDOnly,
        "prefill_local_decode_remote": PrefillLocalDecodeRemote,
    }
)


class PolicyInvalid(ValueError):
    """The text of a policy is invalid, or the policy cannot be used."""


def known() -> list[str]:
    """Return the names of all policies, this project's first."""
    others = {found.name for found in entry_points(group=GROUP)} - OWN.keys()
    return [*OWN, *sorted(others)]


def find(name: str) -> type[Policy]:
    """Return the policy with this name.

    Raises:
        PolicyInvalid: there is no such policy, or it cannot be loaded.
    """
    if (own := OWN.get(name)) is not None:
        return own
    match list(entry_points(group=GROUP, name=name)):
        case [one]:
            where = f"{name} ({one.value})"
        case []:
            raise PolicyInvalid(f"there is no policy {name!r}; known: {', '.join(known())}")
        case several:
            brought = ", ".join(found.value for found in several)
            raise PolicyInvalid(
                f"{name} is provided by more than one distribution: {brought}; uninstall all but "
                "one"
            )
    try:
        policy: Any = one.load()
    except Exception as error:  # a third-party module may raise anything at its import
        raise PolicyInvalid(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(policy, type) and is_dataclass(policy) and hasattr(policy, "course"):
        return cast("type[Policy]", policy)
    raise PolicyInvalid(f"{where} is not a dataclass with a method course")
