"""The condition of an instance: one word for its state and its own health check. Pure."""

import enum

from epd.routing.health import HealthState


class Condition(enum.StrEnum):
    """Condition of an instance: the result of its health check, and whether it gets requests.

    From the best to the worst.
    """

    HEALTHY = "healthy"
    """It passes, and gets requests."""
    PAUSED = "paused"
    """It passes, and gets no requests: it sent a `Retry-After`, or its weight is 0."""
    TRIAL = "trial"
    """It passes, and gets one request at a time until one succeeds."""
    RECOVERING = "recovering"
    """It passes again, and gets requests after its next probe."""
    SUSPECT = "suspect"
    """It passes but failed requests. It gets requests, because too few other instances are left."""
    EJECTED = "ejected"
    """It passes but failed requests. It gets none for a while."""
    FAILING = "failing"
    """It does not pass but gets requests: too few probes and requests have failed yet."""
    DOWN = "down"
    """It does not pass, and gets no requests unless no other instance is left."""

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return self in {Condition.HEALTHY, Condition.PAUSED}

    @property
    def answers(self) -> bool:
        """Whether the instance passes its health check."""
        return self not in {Condition.FAILING, Condition.DOWN}


def condition(state: HealthState, *, answers: bool, routed: bool) -> Condition:
    """Return the condition of an instance.

    Args:
        state: its state in the instance table.
        answers: whether it has just passed its health check.
        routed: whether the next request may go to it.
    """
    if not answers:
        return Condition.FAILING if routed and state is not HealthState.DOWN else Condition.DOWN
    match state:
        case HealthState.HEALTHY:
            return Condition.HEALTHY if routed else Condition.PAUSED
        case HealthState.TRIAL:
            return Condition.TRIAL
        case HealthState.DOWN:
            return Condition.RECOVERING
        case HealthState.EJECTED:
            return Condition.SUSPECT if routed else Condition.EJECTED
