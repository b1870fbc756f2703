"""Clients that send requests while a test changes the fleet."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai

from tests.e2e.asking import ask, picture, unseen
from tests.e2e.served import Served
from tests.requests import Part, text

CLIENTS = 4

PAUSE_S = 1.0
"""Seconds between two requests of a client; a starting engine needs a core too."""

WAIT_S = 300.0
"""Timeout of waits."""

QUESTIONS: Sequence[Sequence[Part]] = (
    (text("say something"),),
    (picture("cat.jpg"), text()),
    (picture("coffee.jpg"), text(), picture("chart.png")),
)

ASKED = "vllm:request_success_total"


@dataclass
class Load:
    """Clients that send one request after the other, and check the answers.

    Attributes:
        stack: target of the requests.
        due: expected answer to each question.
        seen: outcome of each request.
    """

    stack: Served
    due: Sequence[list[str]]
    seen: list[str] = field(default_factory=list)

    def one(self, number: int) -> str:
        """Send a request, some with a new picture; return its outcome."""
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
        """Send requests for the duration of the context."""
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
        """Wait until `count` more requests have ended."""
        before = len(self.seen)
        until(lambda: len(self.seen) >= before + count)

    def recovers(self) -> None:
        """Wait until the last requests had the right answer, while no server has ended."""

        def right() -> bool:
            self.stack.stack.check_alive()
            return self.seen[-2 * CLIENTS :] == ["right"] * 2 * CLIENTS

        until(right)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
