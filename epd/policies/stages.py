"""The policies that say which stages a request goes through."""

from dataclasses import dataclass

from epd.policies.course import Course, Facts
from epd.routing.instances import ANSWERING, Role


@dataclass(frozen=True, slots=True)
class EncodePrefillDecode:
    """Media to encode instances, then prefill, then decode (E+P+D).

    What prefill can have no part in, decode does alone, with the media: it reads no encoder
    outputs.
    """

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        if Role.DECODE not in facts.roles:
            return None
        return Course(encode=facts.prefills, prefill=facts.prefills)


@dataclass(frozen=True, slots=True)
class EncodePD:
    """Media to encode instances; one instance prefills and decodes (E+PD)."""

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        return Course(prefill=False) if Role.PREFILL_DECODE in facts.roles else None


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """No encode stage: prefill gets the media as they came (P+D), or who does both (PD)."""

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        if facts.roles.isdisjoint(ANSWERING):
            return None
        return Course(encode=False, prefill=facts.prefills and Role.DECODE in facts.roles)
