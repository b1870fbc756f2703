"""Engines are killed under load, and restarted; the proxy is not restarted."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from epd.routing.instances import Role
from tests.e2e.asking import ask
from tests.e2e.load import ASKED, CLIENTS, QUESTIONS, Load, until
from tests.e2e.served import Served, metric
from tests.requests import text

NO_OTHER = {"error 502", "error 503", "broken off"}

LONG = 1200
"""Tokens of an answer that is still running when an engine is killed."""


def long_stream(stack: Served) -> Iterator[Any]:
    """Return a stream after its first event."""
    messages: Any = [{"role": "user", "content": [text("go on")]}]
    events = stack.client.chat.completions.create(
        model=stack.model,
        messages=messages,
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(events)
    return events


@pytest.mark.parametrize(
    ("role", "may_end"),
    [
        # Prefill encodes in place of encode, and decode prefills in place of prefill.
        pytest.param(Role.ENCODE, set(), marks=[pytest.mark.fault(5), pytest.mark.fault(14)]),
        pytest.param(Role.PREFILL, set(), marks=[pytest.mark.fault(30), pytest.mark.fault(32)]),
        pytest.param(Role.DECODE, NO_OTHER, marks=[pytest.mark.fault(34), pytest.mark.fault(37)]),
    ],
    ids=["encode", "prefill", "decode"],
)
def test_requests_survive_the_death_and_restart_of_an_engine(
    stack: Served, role: Role, may_end: set[str]
) -> None:
    """No answer is lost or wrong, and only unavoidable errors occur, and only for a while."""
    [engine] = stack.stack.of_role(role)
    due = [ask(stack.baseline, stack.model, *question) for question in QUESTIONS]
    load = Load(stack, due)
    with load.running():
        load.ends(2 * CLIENTS)
        assert set(load.seen) == {"right"}
        events = long_stream(stack)
        stack.stack.kill(engine)
        try:
            if role is Role.DECODE:
                with pytest.raises(openai.APIError, match="decode") as caught:
                    list(events)
                assert type(caught.value) is openai.APIError  # an error event, not a broken stream
            else:
                *_, last = events
                assert last.choices[0].finish_reason == "length"
            load.ends(4 * CLIENTS)
        finally:  # other tests use the stack too
            stack.stack.restart(engine)
        asked = metric(engine, ASKED)
        until(lambda: metric(engine, ASKED) > asked)
        load.recovers()

    counts = Counter(load.seen)
    assert set(counts) <= {"right", *may_end}, counts
    assert may_end == set() or set(counts) & may_end
