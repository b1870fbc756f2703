"""The policy of a proxy beside a prefill instance, such as a sidecar of its pod."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from epd.policies.course import Course, Facts
from epd.routing.instances import Role
from epd.routing.urls import base_url


@dataclass(frozen=True, slots=True)
class PrefillLocalDecodeRemote:
    """Prefills on the instance beside the proxy, and decodes on another host.

    A request that prefill cannot serve goes to decode alone, with its media.

    Attributes:
        local_prefill_url: URL of the instance beside the proxy.

    Raises:
        ValueError: the URL is missing.
    """

    local_prefill_url: Annotated[str, AfterValidator(base_url)] | None = None

    def __post_init__(self) -> None:
        if not self.local_prefill_url:
            raise ValueError("needs local_prefill_url, or a prefill instance in the configuration")

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        encode = facts.prefills and Role.ENCODE in facts.roles
        return Course(encode, prefill=facts.prefills, prefill_url=self.local_prefill_url)
