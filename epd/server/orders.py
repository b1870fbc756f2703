"""Orders to a process: from signals, or from the first process through a pipe."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import orjson

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.proxy_config import LiveConfig

CUT_S = 5.0
"""Time for cancelled requests to send the end of their responses, in seconds."""
CLEANUP_S = 10.0
"""Time for the application's upstream work after the last request, in seconds."""
DRAIN, RELOAD = b"drain", b"reload "
"""Prefixes of the orders that a worker reads from its pipe, one per line."""
READ_BYTES = 64 * 1024


class Orders:
    """Orders to a process, from signals or from the process that started it.

    Attributes:
        drain: report in `/ready` that the process is about to stop, and serve as before.
        close: close the listening sockets, wait for the running requests, and stop.
        now: stop without waiting for the running requests.
        reload: reload the configuration and files; the code that reloads clears the event.
    """

    def __init__(self) -> None:
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

    def drain_or_stop(self, delay_s: float = 0) -> None:
        """Drain, and close after a delay in seconds; at the second call, stop now."""
        if self.drain.is_set():
            self.stop_now()
        else:
            self.drain.set()
            asyncio.get_running_loop().call_later(delay_s, self.close.set)


def orders_by_signal(live: LiveConfig) -> Orders:
    """Return orders that SIGTERM, SIGINT and SIGHUP to this process set."""
    orders = Orders()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(
        signal.SIGTERM, lambda: orders.drain_or_stop(live.current.drain_delay_s)
    )
    # Ctrl-C: there is no load balancer to notify, and the operator waits at the terminal.
    loop.add_signal_handler(signal.SIGINT, orders.drain_or_stop)
    loop.add_signal_handler(signal.SIGHUP, orders.reload.set)
    return orders


class Pipe:
    """Pipe from the first process to a worker.

    Attributes:
        orders: orders that have arrived; to stop, if the pipe has ended.
    """

    def __init__(self, descriptor: int) -> None:
        self.orders = Orders()
        self._descriptor = descriptor
        self._rest = b""
        self._reloaded: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGUSR1, self.orders.stop_now)
        self._loop.add_reader(descriptor, self._read)

    def configured(self) -> ProxyConfig:
        """Return the configuration of the latest order to reload.

        Raises:
            ConfigInvalid: the first process found it invalid.
        """
        if "refused" in self._reloaded:
            raise ConfigInvalid(self._reloaded["refused"])
        return ProxyConfig.model_validate(self._reloaded["config"])

    def _read(self) -> None:
        data = os.read(self._descriptor, READ_BYTES)
        if not data:
            self._loop.remove_reader(self._descriptor)
            self.orders.stop()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == DRAIN:
                self.orders.drain.set()
            elif line.startswith(RELOAD):
                self._reloaded = orjson.loads(line.removeprefix(RELOAD))
                self.orders.reload.set()


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def listening_url(config: ProxyConfig, address: Any) -> str:
    """Return the URL for clients, from the address of a listening socket."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port, *_ = address
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def topology_name(config: ProxyConfig) -> str:
    """Return the number of instances per role, such as `2e1p1d`; `dynamic` if it may change."""
    if config.dynamic:
        return "dynamic"
    encode, decode = len(config.encode_servers_urls), len(config.decode_servers_urls)
    prefill = len(config.prefill_servers_urls)
    encodes = f"{encode}e" if encode else ""
    return f"{encodes}{prefill}p{decode}d" if prefill else f"{encodes}{decode}pd"
