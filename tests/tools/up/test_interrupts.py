"""Signals during `epd up`: contexts are closed and started processes are stopped."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from epd.tools.up.process import Process
from epd.tools.up.settings import Topology
from epd.tools.up.signals import ENDING, hold_signals, leave_contexts_on_signals
from epd.tools.up.stack import Stack
from tests.tools.up.processes import left, marked, new_mark


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    leave_contexts_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_for_the_end_of_an_atomic_step(number: signal.Signals) -> None:
    done = []

    def whole() -> None:
        with hold_signals():
            signal.raise_signal(number)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        whole()

    assert done == [1]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_processes_started_meanwhile_receive_signals() -> None:
    with hold_signals():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()

    assert child.wait(120) == -signal.SIGTERM


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_contexts_on_signals()
    with hold_signals():
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


class Interrupted(Process):
    """Process that receives Ctrl-C while it starts, before the caller has a reference to it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_server_is_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = new_mark()
    monkeypatch.setattr("epd.tools.up.stack.Process", Interrupted)
    monkeypatch.setattr(os, "environ", marked(mark))
    stack = Stack(tmp_path, Topology.parse("1e1pd"), tmp_path, local_media=tmp_path)
    with pytest.raises(KeyboardInterrupt), stack:
        pass

    assert left(mark, 0) == {}
