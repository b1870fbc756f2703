"""The proxy beside a prefill instance, such as a sidecar of its pod."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from epd.policies.course import Course, Facts
from epd.routing.instances import Role
from epd.routing.urls import base_url


@dataclass(frozen=True, slots=True)
class PrefillLocalDecodeRemote:
    """The prefill instance beside the proxy prefills, and another host decodes.

    What prefill can have no part in, decode does alone, with the media.

    Attributes:
        local_prefill_url: the instance beside the proxy.

    Raises:
        ValueError: there is none.
    """

    local_prefill_url: Annotated[str, AfterValidator(base_url)] | None = None

    def __post_init__(self) -> None:
        """Check the option."""
        if not self.local_prefill_url:
            raise ValueError("needs local_prefill_url, or a prefill instance that is configured")

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        if Role.DECODE not in facts.roles:
            return None
        encode = facts.prefills and Role.ENCODE in facts.roles
        return Course(encode, prefill=facts.prefills, prefill_url=self.local_prefill_url)
