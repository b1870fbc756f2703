"""Orders to a process: from signals, or from the first process through a pipe."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from epd.config import ProxyConfig

CUT_S = 5.0
"""Time for cancelled requests to send the end of their responses, in seconds."""
CLEANUP_S = 10.0
"""Time for the application's upstream work after the last request, in seconds."""
GRACE_S = 2.0
"""Time for a process to exit after all that, in seconds."""
DRAIN, RELOAD = b"drain", b"reload"
"""Orders that a worker reads from its pipe, one per line."""
READ_BYTES = 64 * 1024

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of an operator or of a service manager."""


class Orders:
    """Orders to a process, from signals or from the process that started it.

    Attributes:
        drain: report in `/ready` that the process is about to stop, and serve as before.
        close: close the listening sockets, wait for the running requests, and stop.
        now: stop without waiting for the running requests.
        reload: read the files again; the code that reloads clears the event.
        cause: signal that ordered the drain, and its sender.
    """

    def __init__(self) -> None:
        self.cause = ""
        self.drain = asyncio.Event()
        self.close = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()

    def stop(self) -> None:
        self.drain.set()
        self.close.set()

    def stop_now(self) -> None:
        self.now.set()
        self.stop()

    def drain_or_stop(self, cause: str, delay_s: float) -> None:
        """Drain, and close after a delay in seconds; at the second call, stop now."""
        if self.drain.is_set():
            self.stop_now()
        else:
            self.cause = cause
            self.drain.set()
            asyncio.get_running_loop().call_later(delay_s, self.close.set)


def block_signals() -> None:
    """Keep `SIGNALS` for the thread of `orders_by_signal`. Call it before any thread starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def orders_by_signal(config: ProxyConfig) -> Orders:
    """Return orders that SIGTERM, SIGINT and SIGHUP to this process set.

    A thread waits for the signals: it learns their sender, and it ends the process in time even if
    the event loop hangs.
    """
    orders, loop = Orders(), asyncio.get_running_loop()
    obeying = threading.Thread(
        target=_obey_signals, args=(orders, config, loop), name="signals", daemon=True
    )
    obeying.start()
    return orders


def _obey_signals(orders: Orders, config: ProxyConfig, loop: asyncio.AbstractEventLoop) -> NoReturn:
    while True:
        received = signal.sigwaitinfo(SIGNALS)
        with suppress(RuntimeError):  # the loop has ended, and the process is about to
            if received.si_signo == signal.SIGHUP:
                loop.call_soon_threadsafe(orders.reload.set)
                continue
            # Ctrl-C: there is no load balancer to notify, and the operator waits at the terminal.
            delay_s = config.drain_delay_s if received.si_signo == signal.SIGTERM else 0
            # The first process of several kills its workers before that.
            _exit_within(delay_s + config.drain_timeout_s + CUT_S + CLEANUP_S + 3 * GRACE_S)
            cause = (
                f"{signal.Signals(received.si_signo).name} from {_process_name(received.si_pid)}"
            )
            loop.call_soon_threadsafe(orders.drain_or_stop, cause, delay_s)


def _exit_within(seconds: float) -> None:
    """End the process after these seconds if anything that hangs still keeps it running."""
    ending = threading.Timer(seconds, os._exit, (1,))
    ending.daemon = True
    ending.start()


def _process_name(pid: int) -> str:
    if not pid:  # Ctrl-C, or a container's runtime
        return "the terminal or a process outside of this container"
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "a process that has ended"
    return f"{name} (PID {pid})"


def orders_by_pipe(descriptor: int) -> Orders:
    """Return orders that the first process writes to a pipe. To stop, it closes the pipe."""
    orders, loop = Orders(), asyncio.get_running_loop()

    def read() -> None:
        lines = os.read(descriptor, READ_BYTES).splitlines()
        if not lines:
            loop.remove_reader(descriptor)
            orders.stop()
        if DRAIN in lines:
            orders.drain.set()
        if RELOAD in lines:
            orders.reload.set()

    loop.add_signal_handler(signal.SIGUSR1, orders.stop_now)
    loop.add_reader(descriptor, read)
    return orders


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
