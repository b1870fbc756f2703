import pytest

from epd.routing.condition import Condition, condition
from epd.routing.health import HealthState


@pytest.mark.parametrize(
    ("state", "answers", "routed", "expected"),
    [
        (HealthState.HEALTHY, True, True, Condition.HEALTHY),
        (HealthState.HEALTHY, True, False, Condition.PAUSED),
        (HealthState.TRIAL, True, True, Condition.TRIAL),
        (HealthState.TRIAL, True, False, Condition.TRIAL),
        (HealthState.DOWN, True, True, Condition.RECOVERING),
        (HealthState.DOWN, True, False, Condition.RECOVERING),
        (HealthState.EJECTED, True, True, Condition.SUSPECT),
        (HealthState.EJECTED, True, False, Condition.EJECTED),
    ],
)
def test_the_condition_states_whether_an_instance_gets_requests(
    *, state: HealthState, answers: bool, routed: bool, expected: Condition
) -> None:
    assert condition(state, answers=answers, routed=routed) is expected


@pytest.mark.parametrize("state", HealthState)
@pytest.mark.parametrize("routed", [True, False])
def test_an_unreachable_instance_is_never_healthy(*, state: HealthState, routed: bool) -> None:
    found = condition(state, answers=False, routed=routed)

    assert found == ("failing" if routed and state != "down" else "down")
    assert not found.answers
