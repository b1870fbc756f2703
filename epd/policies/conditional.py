"""Conditional disaggregation, for requests that are cheaper on one instance."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from epd.policies.course import Course, Facts
from epd.routing.instances import ANSWERING

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
