"""Engines are killed under load, and come back: the proxy is never started anew."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from epd.routing.instances import Role
from tests.e2e.conftest import Served, metric
from tests.e2e.stacks import CONVERSING, on
from tests.e2e.test_answers import ask, picture, unseen
from tests.requests import Part, text

CLIENTS = 4
PAUSE_S = 1.0
"""Between two requests of a client: an engine that starts wants a core, too."""

WAIT_S = 300.0
"""What has not happened by then will not."""

QUESTIONS: Sequence[Sequence[Part]] = (
    (text("say something"),),
    (picture("cat.jpg"), text()),
    (picture("coffee.jpg"), text(), picture("chart.png")),
)

NO_OTHER = {"error 502", "error 503", "broken off"}

LONG = 1200
"""Tokens of an answer that is not over when an engine dies."""

ASKED = "vllm:request_success_total"


@dataclass
class Load:
    """Clients that ask one question after the other, and check what they get.

    Attributes:
        stack: whom they ask.
        due: each question's answer.
        seen: how each request ended.
    """

    stack: Served
    due: Sequence[list[str]]
    seen: list[str] = field(default_factory=list)

    def one(self, number: int) -> str:
        """How a request ends; some bring a picture that nobody has sent."""
        place, stream = number % (len(QUESTIONS) + 1), number % 2 == 0
        try:
            if place == len(QUESTIONS):
                answer = ask(self.stack.client, self.stack.model, unseen(self.stack), text())
                return "right" if len(answer) == len(self.due[0]) else "wrong"
            answer = ask(self.stack.client, self.stack.model, *QUESTIONS[place], stream=stream)
        except openai.APIStatusError as error:
            return f"error {error.status_code}"
        except openai.APIConnectionError:
            return "lost"
        except openai.APIError:
            return "broken off"
        return "right" if answer == self.due[place] else "wrong"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask meanwhile."""
        over = threading.Event()
        numbers = itertools.count()

        def client() -> None:
            while not over.is_set():
                self.seen.append(self.one(next(numbers)))
                over.wait(PAUSE_S)

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def ends(self, count: int) -> None:
        """Wait until so many more requests have ended."""
        before = len(self.seen)
        until(lambda: len(self.seen) >= before + count)


def long_stream(stack: Served) -> Iterator[Any]:
    """A stream whose first event has come."""
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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


@on(CONVERSING)
@pytest.mark.parametrize(
    ("role", "may_end"),
    [
        # Prefill encodes what nobody else can, and decode does what prefill would.
        pytest.param(Role.ENCODE, set(), marks=[pytest.mark.fault(5), pytest.mark.fault(14)]),
        pytest.param(Role.PREFILL, set(), marks=[pytest.mark.fault(30), pytest.mark.fault(32)]),
        pytest.param(Role.DECODE, NO_OTHER, marks=[pytest.mark.fault(34), pytest.mark.fault(37)]),
    ],
    ids=["encode", "prefill", "decode"],
)
def test_an_engine_is_killed_under_load_and_comes_back(
    stack: Served, role: Role, may_end: set[str]
) -> None:
    """Nothing is lost or wrong, errors are those that nobody could have helped, and they end."""
    [engine] = stack.stack.of(role)
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
                assert type(caught.value) is openai.APIError  # an event said so, it did not break
            else:
                *_, last = events
                assert last.choices[0].finish_reason == "length"
            load.ends(4 * CLIENTS)
        finally:  # other tests use the stack too
            stack.stack.restart(engine)
        asked = metric(engine, ASKED)
        until(lambda: metric(engine, ASKED) > asked)
        until(lambda: load.seen[-2 * CLIENTS :] == ["right"] * 2 * CLIENTS)

    counts = Counter(load.seen)
    assert set(counts) <= {"right", *may_end}, counts
    assert may_end == set() or set(counts) & may_end
