"""The list of instances, from the same sources as the proxy's: configuration, file, store, DNS.

Nothing is written to them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from epd.config import ProxyConfig
from epd.discovery.dns import LookUpFailed
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.instances_file import read_file
from epd.discovery.redis_store import RegistrationsInRedis
from epd.discovery.stores import StoreFailed
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.registry import Change, InstanceSource, Registry
from epd.routing.table import InstanceTable
from epd.routing.urls import at_address
from epd.tools.doctor.findings import FAIL, WARN, Finding
from epd.transfer.registry import load_kv_transfer


@dataclass(frozen=True, slots=True)
class Sources:
    """Instances of all sources that are compatible with each other, and findings about the sources.

    `names` has by URL the host name that the certificate of an instance found by DNS must show.
    """

    instances: Sequence[Instance]
    names: Mapping[str, str]
    findings: Sequence[Finding]


async def read_sources(config: ProxyConfig, known: Sequence[Instance] | None = None) -> Sources:
    """Read every source of instances once; `known` has those of all sources but DNS."""
    findings: list[Finding] = []
    names: dict[str, str] = {}
    transfer = load_kv_transfer(config.kv_transfer)

    def report_change(instance: Instance, change: Change, _: InstanceSource) -> None:
        name = f"{instance.role} {instance.url}"
        if change == "refused" and not transfer.accepts_instance(instance):
            advice = "correct its kv_addr, or remove it from the configuration"
            findings.append(Finding(FAIL, name, "--kv-transfer cannot use it", advice))
        elif change == "refused":
            seen = "is not used: its role conflicts with that of another instance"
            advice = "run either prefill and decode instances, or prefill_decode instances"
            findings.append(Finding(WARN, name, seen, advice))

    registry = Registry(
        InstanceTable(), config.instances, fits=transfer.accepts_instance, on_change=report_change
    )
    if known is None:
        registry.replace(InstanceSource.FILE, _in_file(config, findings))
        known = await _registered(config, findings)
    registry.replace(InstanceSource.API, known)
    registry.replace(
        InstanceSource.DNS, [instance async for instance in _by_name(config, names, findings)]
    )
    instances = [instance for instance, *_ in registry.members]
    findings += _role_findings(config, {instance.role for instance in instances})
    return Sources(instances, names, findings)


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
    advice = "correct it: the proxy does not start without it"
    findings.append(Finding(FAIL, f"file {path}", seen, advice))
    return ()


async def _registered(config: ProxyConfig, findings: list[Finding]) -> Sequence[Instance]:
    if not config.dynamic_registration:
        return ()
    if config.registration_store is None:
        seen = "the doctor cannot see which instances are registered with a running proxy"
        advice = "use the proxy's GET /instances, or keep them in a --registration-store"
        findings.append(Finding(WARN, "registration", seen, advice))
        return ()
    try:
        async with RegistrationsInRedis.connected(config.registration_store) as store:
            return await store.read() or ()
    except StoreFailed as error:
        seen = f"the store cannot be read: {error}"
        advice = "repair --registration-store: until then no instance can register"
        findings.append(Finding(FAIL, "registration", seen, advice))
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
            findings.append(Finding(FAIL, f"{instance.role} {host}", problem, advice))
        for address in sorted(addresses):
            url = at_address(instance.url, address)
            names[url] = host
            yield replace(instance, url=url)


def _role_findings(config: ProxyConfig, roles: set[Role]) -> Iterator[Finding]:
    if config.dynamic_registration and config.registration_store is None:
        return  # registered instances may have the missing roles
    if not roles & set(ANSWERING):
        seen = "none decodes: every request gets a 503"
        yield Finding(FAIL, "instances", seen, "add a decode instance")
    if Role.ENCODE not in roles and config.encodes:
        yield Finding(WARN, "instances", "none encodes", "add an encode instance")
    if Role.DECODE in roles and Role.PREFILL not in roles:
        seen = "none prefills for the decode instances"
        yield Finding(WARN, "instances", seen, "add a prefill instance")
