"""The policies that say which stages a request goes through."""

from epd.policies.course import Course, Facts
from epd.routing.instances import Role


class EncodePrefillDecode:
    """Media to encode instances, then prefill, then decode (E+P+D)."""

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        return Course(prefill=facts.prefills) if Role.DECODE in facts.roles else None


class EncodePrefillDecodeInOne:
    """Media to encode instances; one instance prefills and decodes (E+PD)."""

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        return Course(prefill=False) if Role.PREFILL_DECODE in facts.roles else None
