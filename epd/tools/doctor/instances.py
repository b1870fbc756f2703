"""Facts about instances without a request to the model, and the list of instances itself.

The list comes from the same sources as the proxy's: configuration, file, registration store, DNS.
Nothing is written to them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from epd.config import ProxyConfig
from epd.discovery.dns import LookUpFailed
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.stores import RegistrationsInRedis, StoreFailed
from epd.discovery.watching import read_file
from epd.errors import ProxyError
from epd.http.connection import Broken, Unreachable
from epd.http.http1 import request_head, target_of
from epd.http.pool import Pool
from epd.json_or_none import json_or_none
from epd.kv_events.addresses import EventSource, event_sources
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.registry import Change, InstanceSource, Registry
from epd.routing.reports import read_namespaces
from epd.routing.table import InstanceTable
from epd.routing.urls import at_address
from epd.tools.doctor.facts import (
    Finding,
    InstanceFacts,
    ModelFacts,
    Trial,
    fail,
    read_preparation,
    warn,
)
from epd.transfer.registry import KV_TRANSFERS
from epd.upstream import KEEP_ALIVE_S, Answer, Upstream, underlying_error

IDLE_S = KEEP_ALIVE_S + 0.5
"""Time for which an instance must keep an idle connection: a little longer than the proxy does."""


@dataclass(frozen=True, slots=True, eq=False)
class InstanceReader:
    """Reader of what instances report; its pool keeps connections for longer than `IDLE_S`."""

    _upstream: Upstream
    _pool: Pool
    _headers: Mapping[str, str]
    _timeout_s: float

    async def read_instance(self, instance: Instance) -> InstanceFacts:
        """Return the facts about an instance. This takes a little longer than `IDLE_S`."""
        try:
            health = await self._get(instance, "/health")
            if not health.ok:
                seen = f"GET /health: {health.status}"
                return InstanceFacts(instance, seen, answered=health.status)
            version, models, metrics, keeps_alive = await asyncio.gather(
                self._get(instance, "/version"),
                self._get(instance, "/v1/models"),
                self._get(instance, "/metrics"),
                self._keeps_alive(instance),
            )
        except ProxyError as error:
            refuses = isinstance(underlying_error(error), ConnectionRefusedError)
            seen = f"{error} ({error.__cause__ or type(error).__name__})"
            return InstanceFacts(instance, seen, refuses=refuses)
        if models.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return InstanceFacts(instance, "requires an API key: set OPENAI_API_KEY")
        if not models.ok and not version.ok:
            seen = f"GET /version: {version.status}, GET /v1/models: {models.status}"
            return InstanceFacts(instance, seen, answered=models.status)
        return InstanceFacts(
            instance,
            version=_text(_json(version).get("version")),
            models=_models(_json(models)),
            skew_s=_skew_s(health),
            keeps_alive=keeps_alive,
            namespaces=read_namespaces(metrics.body) - {""} if metrics.ok else frozenset(),
            preparation=read_preparation(metrics.body) if metrics.ok else None,
        )

    async def _get(self, instance: Instance, path: str) -> Answer:
        return await self._upstream.fetch(
            instance.url + path, stage="proxy", headers=self._headers, timeout_s=self._timeout_s
        )

    async def _keeps_alive(self, instance: Instance) -> bool | None:
        """Return whether a connection is open after `IDLE_S` of idleness; None: not known."""
        target = target_of(instance.url + "/health")
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            connection = await self._pool.connect(target.origin)
            try:
                head = request_head(target, self._headers, None)
                await connection.send_request(head, (), until_s)
                while await connection.chunk(until_s):
                    pass
                await asyncio.sleep(IDLE_S)
                return connection.is_usable
            finally:
                connection.abort()
        except (Unreachable, Broken, TimeoutError):
            return None


def _json(answer: Answer) -> Mapping[str, Any]:
    value = json_or_none(answer.body)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _models(answer: Mapping[str, Any]) -> tuple[ModelFacts, ...]:
    rows = answer.get("data")
    return tuple(
        ModelFacts(
            row["id"],
            _text(row.get("root")),
            _length(row.get("max_model_len")),
            _text(row.get("parent")),
        )
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("id"), str)
    )


def _length(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _skew_s(answer: Answer) -> float | None:
    try:
        date = parsedate_to_datetime(answer.headers.get("Date", ""))
    except ValueError:
        return None
    return date.timestamp() - time.time()


@dataclass(frozen=True, slots=True)
class KnownInstances:
    """Instances of all sources that are compatible with each other, and defects of the sources.

    `names` has by URL the host name that the certificate of an instance found by DNS must show.
    """

    instances: Sequence[Instance]
    names: Mapping[str, str]
    findings: Sequence[Finding]


async def read_sources(config: ProxyConfig) -> KnownInstances:
    """Read every source of instances once."""
    findings: list[Finding] = []
    names: dict[str, str] = {}
    transfer = KV_TRANSFERS[config.kv_transfer]()

    def report_change(instance: Instance, change: Change, _: InstanceSource) -> None:
        name = f"{instance.role} {instance.url}"
        if change == "refused" and not transfer.accepts_instance(instance):
            advice = "correct its kv_addr, or remove it from the configuration"
            findings.append(fail(name, "--kv-transfer cannot use it", advice))
        elif change == "refused":
            advice = "run either prefill and decode instances, or prefill_decode instances"
            seen = "is not used: its role conflicts with that of another instance"
            findings.append(warn(name, seen, advice))

    registry = Registry(
        InstanceTable(), config.instances, fits=transfer.accepts_instance, on_change=report_change
    )
    registry.replace(InstanceSource.FILE, _in_file(config, findings))
    registry.replace(InstanceSource.API, await _registered(config, findings))
    registry.replace(
        InstanceSource.DNS, [instance async for instance in _by_name(config, names, findings)]
    )
    instances = [instance for instance, *_ in registry.members]
    findings += _judge_roles(config, {instance.role for instance in instances})
    return KnownInstances(instances, names, findings)


def _in_file(config: ProxyConfig, findings: list[Finding]) -> Sequence[Instance]:
    path = config.instances_file
    if path is None:
        return ()
    try:
        raw = read_file(path)
        if raw is not None:
            return read_yaml(raw)
        seen = "it does not exist"
    except (EntriesInvalid, OSError) as error:
        seen = str(error)
    findings.append(fail(f"file {path}", seen, "correct it: the proxy does not start without it"))
    return ()


async def _registered(config: ProxyConfig, findings: list[Finding]) -> Sequence[Instance]:
    if not config.dynamic_registration:
        return ()
    if config.registration_store is None:
        seen = "the doctor cannot see which instances are registered with a running proxy"
        advice = "use the proxy's GET /instances, or keep registrations in a --registration-store"
        findings.append(warn("registration", seen, advice))
        return ()
    try:
        async with RegistrationsInRedis.connected(config.registration_store) as store:
            return await store.read() or ()
    except StoreFailed as error:
        advice = "repair --registration-store: until then no instance can register"
        findings.append(fail("registration", f"the store cannot be read: {error}", advice))
        return ()


async def _by_name(
    config: ProxyConfig, names: dict[str, str], findings: list[Finding]
) -> AsyncIterator[Instance]:
    if not config.discovered_instances:
        return
    from epd.discovery.dns import DnsNames  # noqa: PLC0415 - slow to import

    look_up = DnsNames(config.discovery_dns_server).resolve_addresses
    for instance in config.discovered_instances:
        host = urlsplit(instance.url).hostname or ""
        try:
            addresses = await look_up(host)
            problem = None if addresses else "it has no address"
        except LookUpFailed as error:
            addresses, problem = frozenset(), f"it cannot be looked up: {error}"
        if problem is not None:
            advice = "correct the name in --discover-…, or set another --discovery-dns-server"
            findings.append(fail(f"{instance.role} {host}", problem, advice))
        for address in sorted(addresses):
            url = at_address(instance.url, address)
            names[url] = host
            yield replace(instance, url=url)


def _judge_roles(config: ProxyConfig, roles: set[Role]) -> Iterator[Finding]:
    if config.dynamic_registration and config.registration_store is None:
        return  # registered instances may have the missing roles
    if not roles & set(ANSWERING):
        yield fail("instances", "none decodes: every request gets a 503", "add a decode instance")
    if Role.ENCODE not in roles and config.encodes:
        yield warn("instances", "none encodes", "add an encode instance")
    if Role.DECODE in roles and Role.PREFILL not in roles:
        yield warn("instances", "none prefills for the decode instances", "add a prefill instance")


async def try_subscription(instance: Instance, addresses: Sequence[str], timeout_s: float) -> Trial:
    """Return whether each engine of an instance accepts a subscriber to its KV events."""
    return await asyncio.to_thread(_subscribe, event_sources(instance, addresses), timeout_s)


def _subscribe(sources: Iterable[EventSource], timeout_s: float) -> Trial:
    import zmq  # noqa: PLC0415 - of the extra `kv-events`

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for endpoint, _ in sources:
            socket = context.socket(zmq.SUB)
            socket.set(zmq.IPV6, 1)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(endpoint)
            if not monitor.poll(int(1000 * timeout_s)):
                return Trial(f"{endpoint} accepts no subscriber")
    finally:
        context.destroy(0)
    return Trial()
