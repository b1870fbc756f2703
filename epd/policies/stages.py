"""The policies that select stages by the roles of the fleet."""

from dataclasses import dataclass

from epd.policies.course import Course, Facts
from epd.routing.instances import ANSWERING, Role


@dataclass(frozen=True, slots=True)
class EncodePrefillDecode:
    """Sends media to encode instances, then prefills, then decodes (E+P+D).

    A request that prefill cannot serve goes to decode alone, with its media: decode reads no
    encoder outputs.
    """

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        return Course(encode=facts.prefills, prefill=facts.prefills)


@dataclass(frozen=True, slots=True)
class EncodePD:
    """Sends media to encode instances; one instance prefills and decodes (E+PD)."""

    def course(self, facts: Facts) -> Course | None:
        return Course(prefill=False) if Role.PREFILL_DECODE in facts.roles else None


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Skips the encode stage: prefill gets the media as received (P+D), or the PD instance does."""

    def course(self, facts: Facts) -> Course | None:
        if facts.roles.isdisjoint(ANSWERING):
            return None
        return Course(encode=False, prefill=facts.prefills and Role.DECODE in facts.roles)
