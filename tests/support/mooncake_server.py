"""Private `mooncake_master`, and the environment of servers that use Mooncake's library.

    .run/mooncake/mooncake/mooncake_master --rpc_port=… --rpc_address=127.0.0.1 …

`scripts/setup.sh` installs the package into .run/mooncake, which is on the PYTHONPATH of the
servers alone: its name is that of packages which engines have.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from tests.paths import ROOT
from tests.support.redis_server import START_S, free_port

FOLDER = ROOT / ".run" / "mooncake"
BINARY = FOLDER / "mooncake" / "mooncake_master"


def why_not() -> str | None:
    """Return why Mooncake cannot run here; None if it can."""
    if not BINARY.exists():
        return f"{BINARY} is missing: scripts/setup.sh could not install Mooncake"
    tried = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=False)
    library = "error while loading shared libraries"
    return tried.stderr.strip() if library in tried.stderr else None


def environment() -> dict[str, str]:
    """Return the environment of a process that may import Mooncake."""
    path = f"{ROOT}{os.pathsep}{FOLDER}"
    return {**os.environ, "PYTHONPATH": path}


@dataclass
class MooncakeMaster:
    """Master on 127.0.0.1 without entries.

    Attributes:
        folder: folder of its log.
        flags: further flags. A lease is short, so that entries can be evicted.
    """

    folder: Path
    flags: Mapping[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the master, and wait until it listens."""
        flags = {
            "rpc_port": self.port,
            "rpc_address": "127.0.0.1",
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "default_kv_lease_ttl": 200,
            "logtostderr": "true",
            **self.flags,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        with (self.folder / "master.log").open("ab") as log:
            self.process = subprocess.Popen([BINARY, *words], stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        raise RuntimeError((self.folder / "master.log").read_text()[-2000:])

    def url(self, query: str = "") -> str:
        return f"mooncake://127.0.0.1:{self.port}?host=127.0.0.1&{query}"

    def names(self) -> list[str]:
        """Return the names of all values, of the master's administration service."""
        url = f"http://127.0.0.1:{self.metrics_port}/get_all_keys"
        with urlopen(url, timeout=START_S) as reply:
            return sorted(reply.read().decode().split())

    def owner(self, name: str) -> str:
        """Return the owner of a value's first copy, of the master's administration service."""
        url = f"http://127.0.0.1:{self.metrics_port}/query_key?key={name}"
        with urlopen(url, timeout=START_S) as reply:
            return str(json.load(reply)["data"][0]["transport_endpoint_"])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
