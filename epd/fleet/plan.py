"""All servers of a fleet."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from epd.fleet.engine import Engine
from epd.fleet.server import Server
from epd.routing.instances import Role

ANSWERS = (Role.DECODE, Role.PREFILL_DECODE)
"""The roles of which one instance at least must run: the proxy does without the others."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
"""Where a server is reached from its own machine that listens on all its addresses."""


PROXY = "proxy"
"""The proxy's name among the servers."""
DRAIN_S = 5
"""How long requests may go on when all servers are told to stop."""
MOST = 65535
LOOPBACK = "127.0.0.1"


def url_of(host: str, port: int) -> str:
    """Base URL of a server, as seen from its machine."""
    host = EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All servers of a fleet.

    Attributes:
        engines: the vLLM instances.
        store: URL of the encoder cache; empty: there is none.
        host, port: where the proxy listens.
        local_media: folder that file:// media may come from.
        proxy_flags: more of the proxy's command line.
        keeper_port: where the service listens that keeps the store within its quota; none: no
            service is started.
    """

    engines: tuple[Engine, ...]
    store: str
    host: str = LOOPBACK
    port: int
    local_media: str | None = None
    proxy_flags: tuple[str, ...] = ()
    keeper_port: int | None = None

    @property
    def url(self) -> str:
        """Base URL of the proxy, as seen from its machine."""
        return url_of(self.host, self.port)

    def of(self, *roles: Role) -> list[Engine]:
        """The engines of some roles."""
        return [engine for engine in self.engines if engine.role in roles]

    def servers(self) -> list[Server]:
        """What is started, in this order."""
        keeper = [] if self.keeper_port is None else [self._keeper(self.keeper_port)]
        return [*keeper, *(engine.server() for engine in self.engines), self._proxy()]

    def lacking(self, running: Collection[str]) -> str | None:
        """Why no request is answered any more; None: they are.

        Args:
            running: the names of the servers that still run.
        """
        if PROXY not in running:
            return "The proxy is gone"
        if not any(engine.name in running for engine in self.of(*ANSWERS)):
            return "Nothing that decodes is left"
        return None

    def ports(self) -> dict[int, tuple[str, str]]:
        """For each port that is listened on, the address and what messages call its owner.

        Raises:
            ValueError: two servers have one port, or counting up led beyond all ports.
        """
        wanted = [(self.port, self.host, "the proxy")]
        if self.keeper_port is not None:
            wanted.append((self.keeper_port, LOOPBACK, "the store"))
        for engine in self.engines:
            wanted.append((engine.port, LOOPBACK, engine.name))
            if engine.transfers_kv:
                wanted.append((engine.side_channel_port, LOOPBACK, f"NIXL of {engine.name}"))
        owners: dict[int, tuple[str, str]] = {}
        for port, host, owner in wanted:
            if port > MOST:
                raise ValueError(f"{owner}: there is no port {port}")
            if port in owners:
                raise ValueError(f"port {port} is wanted for {owners[port][1]} and for {owner}")
            owners[port] = (host, owner)
        return owners

    def _keeper(self, port: int) -> Server:
        command = (sys.executable, "-m", "ec_store", "serve", self.store, "--port", str(port))
        return Server("store", url_of(LOOPBACK, port), command, {})

    def _proxy(self) -> Server:
        roles: dict[str, Sequence[Role]] = {
            "encode": [Role.ENCODE],
            "prefill": [Role.PREFILL],
            "decode": ANSWERS,
        }
        media = self.local_media
        command = (
            *(sys.executable, "-m", "epd", "serve", "--host", self.host, "--port", str(self.port)),
            *("--drain-delay-s", "0", "--drain-timeout-s", str(DRAIN_S)),
            *(("--ec-store", self.store) if self.store else ()),
            *(() if media is None else ("--allowed-local-media-path", media)),
            *(
                f"--{stage}-servers-urls={','.join(engine.url for engine in self.of(*some))}"
                for stage, some in roles.items()
            ),
            *self.proxy_flags,
        )
        return Server(PROXY, self.url, command, {})
