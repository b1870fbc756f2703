"""First process with two workers that run a coroutine of this module: `python -m` with its name."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import structlog

from epd.config import ProxyConfig
from epd.edge.files import Files
from epd.observe import logs
from epd.request.request import request_id
from epd.workers.orders import block_signals
from epd.workers.supervisor import supervise
from epd.workers.worker import WorkerSlot

URLS = ("http://127.0.0.1:1",)


def process_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


def pipes_and_sockets() -> list[str]:
    """Return the pipes and sockets that are open, except standard input, output and error."""
    others = [path for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]
    targets = [str(path.readlink()) for path in others if path.exists()]
    return [target for target in targets if target.startswith(("pipe:", "socket:"))]


async def reports(slot: WorkerSlot, config: ProxyConfig, files: Files, orders: int) -> None:
    """Print the state in which the worker starts, and run until the pipe of orders ends."""
    _ = config, files
    state = {
        "worker": slot.number,
        "name": process_name(),
        "request_id": request_id(None),
        "leads_its_group": os.getpgid(0) == os.getpid(),
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [
            number.name
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
            if signal.getsignal(number) == signal.SIG_IGN
        ],
        "pipes_and_sockets": pipes_and_sockets(),
    }
    sys.stdout.write(json.dumps(state) + "\n")
    sys.stdout.flush()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(orders, ended.set)
    await ended.wait()


async def ends(slot: WorkerSlot, config: ProxyConfig, files: Files, orders: int) -> None:
    """Log a line that waits for its batch, and return."""
    _ = slot, config, files, orders
    lines: logs.RequestLines = structlog.get_config()["logger_factory"]
    lines.write(lambda: {"waits": "for its batch"})


async def fails(slot: WorkerSlot, config: ProxyConfig, files: Files, orders: int) -> None:
    _ = slot, config, files, orders
    raise ValueError("a broken worker")


async def hangs(slot: WorkerSlot, config: ProxyConfig, files: Files, orders: int) -> None:
    """Stop the process: the first worker at once, the second one when its pipe of orders ends."""
    _ = config, files
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(orders, ended.set)
    if slot.number == 2:
        await ended.wait()
    os.kill(os.getpid(), signal.SIGSTOP)


def main(worker_main: str) -> None:
    block_signals()
    logs.configure("json", "info")
    config = ProxyConfig(
        encode_servers_urls=URLS,
        decode_servers_urls=URLS,
        host="127.0.0.1",
        port=0,
        workers=2,
        drain_delay_s=0,
        log_format="json",
    )
    programs = {"reports": reports, "ends": ends, "fails": fails, "hangs": hangs}
    asyncio.run(supervise(config, programs[worker_main], hung_beats=2))


if __name__ == "__main__":
    main(sys.argv[1])
