"""Signals during `epd up`: contexts are closed and started processes are stopped."""

import asyncio
import signal
from collections.abc import Iterator

import pytest
import uvloop

from epd.tools.up.signals import interrupts_held_back, leave_contexts_on_signals

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    leave_contexts_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_contexts_on_signals()
    signal.raise_signal(signal.SIGHUP)

    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_in_a_callback_of_a_loop_is_not_lost(number: signal.Signals) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        await asyncio.sleep(600)

    with (
        pytest.raises(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main())


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_for_the_record_of_a_started_server(number: signal.Signals) -> None:
    leave_contexts_on_signals()
    steps = []

    def start() -> None:
        with interrupts_held_back():
            signal.raise_signal(number)
            steps.append("recorded")

    with pytest.raises(KeyboardInterrupt):
        start()

    assert steps == ["recorded"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
