"""What an instance is said to be where both its own answer and the routing of requests count.

Pure: the caller has asked the instance and the table.
"""

import enum

from epd.routing.health import State


class Condition(enum.StrEnum):
    """One word for whether an instance answers its health check, and whether it gets requests."""

    HEALTHY = "healthy"
    """It answers, and gets requests."""
    PAUSED = "paused"
    """It answers, and gets no requests: it has asked for a rest, or its weight is 0."""
    TRIAL = "trial"
    """It answers, and gets one request at a time until one is answered."""
    RECOVERING = "recovering"
    """It answers again; it gets requests after its next probe."""
    SUSPECT = "suspect"
    """It answers and failed requests; it gets requests, as too few others would be left."""
    EJECTED = "ejected"
    """It answers and failed requests; it gets none for a time."""
    FAILING = "failing"
    """It does not answer, and gets requests: no probe has noticed, or no other instance is left."""
    DOWN = "down"
    """It does not answer, and gets no requests."""


WORST = tuple(Condition)
"""The worst last."""

WELL = frozenset({Condition.HEALTHY, Condition.PAUSED})
"""Conditions in which nothing is wrong."""

UNANSWERED = frozenset({Condition.FAILING, Condition.DOWN})
"""Conditions of an instance that does not answer."""


def condition(state: State, *, answers: bool, routed: bool) -> Condition:
    """Return the condition of an instance.

    Args:
        state: what the table makes of it.
        answers: whether it has answered its health check just now.
        routed: whether the next request may go to it.
    """
    if not answers:
        return Condition.FAILING if routed else Condition.DOWN
    match state:
        case State.HEALTHY:
            return Condition.HEALTHY if routed else Condition.PAUSED
        case State.TRIAL:
            return Condition.TRIAL
        case State.DOWN:
            return Condition.RECOVERING
        case State.EJECTED:
            return Condition.SUSPECT if routed else Condition.EJECTED
