"""Conditional disaggregation: what a handover would cost more than it saves."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from epd.policies.course import Course, Facts
from epd.routing.instances import ANSWERING

MAX_TOKENS = 2**31 - 1
"""Of a prompt: more than any has."""


@dataclass(frozen=True, slots=True)
class PDOnly:
    """One instance does all of a request that is short, or that is text alone.

    It has to see more to an answer with media: those are left to the policies that follow.

    Attributes:
        skip_prefill_below_tokens: prompts of fewer tokens are short; 0: none is.
        skip_prefill_for_text: whether all prompts of text are meant, however long.

    Raises:
        ValueError: no request would be meant.
    """

    skip_prefill_below_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    skip_prefill_for_text: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.skip_prefill_below_tokens and not self.skip_prefill_for_text:
            raise ValueError(
                "does nothing without skip_prefill_below_tokens or skip_prefill_for_text"
            )

    def course(self, facts: Facts) -> Course | None:
        """See `Policy`."""
        if facts.items or facts.roles.isdisjoint(ANSWERING):
            return None
        if self.skip_prefill_for_text or facts.prompt_tokens < self.skip_prefill_below_tokens:
            return Course(encode=False, prefill=False)
        return None
