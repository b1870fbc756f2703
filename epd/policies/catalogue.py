"""The policies there are, by name: this project's, and those that other distributions bring."""

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
    """What is written is no policy, or is one that cannot be used."""


def known() -> list[str]:
    """All names, this project's first."""
    others = {found.name for found in entry_points(group=GROUP)} - OWN.keys()
    return [*OWN, *sorted(others)]


def find(name: str) -> type[Policy]:
    """The policy of a name.

    Raises:
        PolicyInvalid: there is none, or it cannot be loaded.
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
            raise PolicyInvalid(f"{name} is brought by more than one distribution: {brought}")
    try:
        policy: Any = one.load()
    except Exception as error:  # whatever its module does when it is imported
        raise PolicyInvalid(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(policy, type) and is_dataclass(policy) and hasattr(policy, "course"):
        return cast("type[Policy]", policy)
    raise PolicyInvalid(f"{where} is no dataclass with a method course")
