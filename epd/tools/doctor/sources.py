"""The list of instances, from the same sources as the proxy's: configuration, file, store, DNS.

Nothing is written to them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from epd.config import ProxyConfig
from epd.discovery.dns import LookUpFailed
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.stores import RegistrationsInRedis, StoreFailed
from epd.discovery.watching import read_file
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.registry import Change, InstanceSource, Registry
from epd.routing.table import InstanceTable
from epd.routing.urls import at_address
from epd.tools.doctor.facts import SourceDefect
from epd.transfer.registry import KV_TRANSFERS


@dataclass(frozen=True, slots=True)
class Sources:
    """Instances of all sources that are compatible with each other, and defects of the sources.

    `names` has by URL the host name that the certificate of an instance found by DNS must show.
    """

    instances: Sequence[Instance]
    names: Mapping[str, str]
    defects: Sequence[SourceDefect]


async def read_sources(config: ProxyConfig) -> Sources:
    """Read every source of instances once."""
    defects: list[SourceDefect] = []
    names: dict[str, str] = {}
    transfer = KV_TRANSFERS[config.kv_transfer]()

    def report_change(instance: Instance, change: Change, _: InstanceSource) -> None:
        name = f"{instance.role} {instance.url}"
        if change == "refused" and not transfer.accepts_instance(instance):
            defects.append(SourceDefect("kv_addr", name, "--kv-transfer cannot use it"))
        elif change == "refused":
            seen = "is not used: its role conflicts with that of another instance"
            defects.append(SourceDefect("role", name, seen))

    registry = Registry(
        InstanceTable(), config.instances, fits=transfer.accepts_instance, on_change=report_change
    )
    registry.replace(InstanceSource.FILE, _in_file(config, defects))
    registry.replace(InstanceSource.API, await _registered(config, defects))
    registry.replace(
        InstanceSource.DNS, [instance async for instance in _by_name(config, names, defects)]
    )
    instances = [instance for instance, *_ in registry.members]
    defects += _role_defects(config, {instance.role for instance in instances})
    return Sources(instances, names, defects)


def _in_file(config: ProxyConfig, defects: list[SourceDefect]) -> Sequence[Instance]:
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
    defects.append(SourceDefect("file", f"file {path}", seen))
    return ()


async def _registered(config: ProxyConfig, defects: list[SourceDefect]) -> Sequence[Instance]:
    if not config.dynamic_registration:
        return ()
    if config.registration_store is None:
        seen = "the doctor cannot see which instances are registered with a running proxy"
        defects.append(SourceDefect("memory", "registration", seen))
        return ()
    try:
        async with RegistrationsInRedis.connected(config.registration_store) as store:
            return await store.read() or ()
    except StoreFailed as error:
        seen = f"the store cannot be read: {error}"
        defects.append(SourceDefect("registrations", "registration", seen))
        return ()


async def _by_name(
    config: ProxyConfig, names: dict[str, str], defects: list[SourceDefect]
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
            defects.append(SourceDefect("name", f"{instance.role} {host}", problem))
        for address in sorted(addresses):
            url = at_address(instance.url, address)
            names[url] = host
            yield replace(instance, url=url)


def _role_defects(config: ProxyConfig, roles: set[Role]) -> Iterator[SourceDefect]:
    if config.dynamic_registration and config.registration_store is None:
        return  # registered instances may have the missing roles
    if not roles & set(ANSWERING):
        seen = "none decodes: every request gets a 503"
        yield SourceDefect("no decode", "instances", seen)
    if Role.ENCODE not in roles and config.encodes:
        yield SourceDefect("no encode", "instances", "none encodes")
    if Role.DECODE in roles and Role.PREFILL not in roles:
        yield SourceDefect("no prefill", "instances", "none prefills for the decode instances")
