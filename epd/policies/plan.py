"""Interface of a coordination policy, and the policies of this project.

A policy gets `Facts` and returns a `Course`. Most policies select the stages by the roles of the
fleet. Of the others, one is for requests that are cheaper on one instance (conditional
disaggregation), and one for a proxy beside a prefill instance, such as a sidecar of its pod.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from epd.routing.instances import ANSWERING, Role
from epd.routing.urls import base_url

DecodeChoice = Literal["late", "early"]
"""Time at which the decode instance is chosen: after prefill has answered, or before its request.
"""

DecodeFrom = Literal["table", "header", "picker"]
"""The origin of the decode instance's choice: the proxy's own table, the client's header, or an
endpoint picker over HTTP."""


@dataclass(frozen=True)
class Facts:
    """The known facts about a request and the fleet before any sending.

    Attributes:
        path: route of the endpoint.
        prefills: whether a prefill instance can serve its part of the request.
        items: number of media items.
        roles: roles with at least one instance.
        measure: estimates the number of tokens in its text; called at most once.
        headers: headers of the client, case-insensitive.
    """

    path: str
    prefills: bool
    items: int
    roles: frozenset[Role]
    measure: Callable[[], int] = lambda: 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def prompt_tokens(self) -> int:
        """The estimated number of tokens in its text (`epd.api.prompts`)."""
        return self.measure()


class Course(NamedTuple):
    """The stages of one request.

    Attributes:
        encode: whether its media go through the encode stage; else prefill or decode encode them.
        prefill: whether a prefill instance does prefill's part; else decode does both.
        prefill_url: URL of the only eligible prefill instance; None for any.
        decode_from: origin of the decode instance's choice; None for the policy's option.
        decode_choice: when decode is chosen; None for the policy's option.
    """

    encode: bool = True
    prefill: bool = True
    prefill_url: str | None = None
    decode_from: DecodeFrom | None = None
    decode_choice: DecodeChoice | None = None


class Policy(Protocol):
    """Decides the course of the requests to which it applies.

    A policy is a dataclass. Its fields are its options.
    """

    def course(self, facts: Facts) -> Course | None:
        """Return the stages of a request; None if the policy does not apply to it.

        It is called for each request, on the event loop: it must return at once. It is also called
        when it takes effect, with sample requests (`epd.policies.registry`).
        """


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


MAX_TOKENS = 2**31 - 1
"""Upper bound of a prompt's tokens, above that of any model."""


@dataclass(frozen=True, slots=True)
class PDOnly:
    """Serves a request on one instance if its prompt is short or has only text.

    It does not apply to requests with media, which need more work before decode.

    Attributes:
        skip_prefill_below_tokens: number of tokens below which a prompt is short; 0 for never.
        skip_prefill_for_text: whether it applies to all prompts of text, regardless of length.

    Raises:
        ValueError: no request could match the options.
    """

    skip_prefill_below_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    skip_prefill_for_text: bool = False

    def __post_init__(self) -> None:
        if not self.skip_prefill_below_tokens and not self.skip_prefill_for_text:
            raise ValueError(
                "does nothing without skip_prefill_below_tokens or skip_prefill_for_text"
            )

    def course(self, facts: Facts) -> Course | None:
        if facts.items or facts.roles.isdisjoint(ANSWERING):
            return None
        if self.skip_prefill_for_text or facts.prompt_tokens < self.skip_prefill_below_tokens:
            return Course(encode=False, prefill=False)
        return None
