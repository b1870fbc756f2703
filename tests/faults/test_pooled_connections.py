"""Row 48: an instance that closes an idle connection just when the proxy reuses it."""

from functools import partial

import pytest

from epd.http.connection import STALE_S
from epd.request.pipeline import Pipeline
from epd.routing.retries import Retries
from epd.server import app as proxy_app
from tests.faults.scripted import (
    Script,
    Scripted,
    Step,
    answer,
    close,
    read_request,
    reset,
    send,
    wait,
)
from tests.requests import request, text
from tests.support.fleet import Launch

pytestmark = pytest.mark.fault(48)
launch = Launch()

REUSED = [read_request(), send(answer(b'{"choices": []}')), read_request()]
"""Answer the first request of a connection, and read the second."""


async def outcome(script: Script, requests: int) -> tuple[list[int], int]:
    """Return the statuses of these requests, and the number of connections for them."""
    async with (
        Scripted(script).running() as instance,
        launch(decode_servers_urls=(instance.url,)) as fleet,
    ):
        statuses = [(await fleet.chat(request(text())))[0] for _ in range(requests)]
        return statuses, len(instance.exchanges)


@pytest.fixture(autouse=True)
def _one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no room for retries: otherwise the request itself would be retried."""
    no_place = Retries(patience_s=0.0, least=0, share=0.0)
    monkeypatch.setattr(proxy_app, "Pipeline", partial(Pipeline, _retries=no_place))


@pytest.mark.parametrize("end", [close(), reset()], ids=["closed", "reset"])
async def test_a_connection_that_ends_when_it_is_used_again_is_replaced_unseen(end: Step) -> None:
    assert await outcome([*REUSED, end], 4) == ([200] * 4, 4)


@pytest.mark.parametrize("worked", [send(b"HTTP/1.1 200 OK\r\nX: "), wait(STALE_S + 0.5)])
async def test_a_request_that_an_instance_worked_on_is_not_sent_again_unseen(worked: Step) -> None:
    assert await outcome([*REUSED, worked, close()], 2) == ([200, 502], 1)


async def test_a_new_connection_that_ends_is_the_instances_failure() -> None:
    assert await outcome([read_request(), close()], 1) == ([502], 1)
