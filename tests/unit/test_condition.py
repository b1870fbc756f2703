import pytest

from epd.routing.health import UNANSWERED, Condition, State, condition


@pytest.mark.parametrize(
    ("state", "answers", "routed", "expected"),
    [
        (State.HEALTHY, True, True, Condition.HEALTHY),
        (State.HEALTHY, True, False, Condition.PAUSED),
        (State.TRIAL, True, True, Condition.TRIAL),
        (State.TRIAL, True, False, Condition.TRIAL),
        (State.DOWN, True, True, Condition.RECOVERING),
        (State.DOWN, True, False, Condition.RECOVERING),
        (State.EJECTED, True, True, Condition.SUSPECT),
        (State.EJECTED, True, False, Condition.EJECTED),
    ],
)
def test_an_instance_that_answers_is_said_to_get_requests_or_not(
    *, state: State, answers: bool, routed: bool, expected: Condition
) -> None:
    assert condition(state, answers=answers, routed=routed) is expected


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize(("routed", "expected"), [(True, "failing"), (False, "down")])
def test_an_instance_that_does_not_answer_is_never_called_well(
    *, state: State, routed: bool, expected: str
) -> None:
    found = condition(state, answers=False, routed=routed)

    assert found == expected
    assert found in UNANSWERED
