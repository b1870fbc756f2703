"""Who takes part, as far as it can be seen from outside the proxy. Nothing is written."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from epd.config import ProxyConfig
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.folder import read_file
from epd.discovery.look_ups import LookUpFailed
from epd.discovery.membership import opened
from epd.discovery.stores import StoreFailed
from epd.doctor.findings import Finding, fail, warn
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.registry import Change, Registry, Source
from epd.routing.table import InstanceTable
from epd.routing.urls import at_address
from epd.transfer.flavours import KV_TRANSFERS


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who takes part.

    Attributes:
        instances: all that the sources name and that go together.
        names: whose certificates those have to show that were found by name, by URL.
        findings: what is wrong with the sources.
    """

    instances: Sequence[Instance]
    names: Mapping[str, str]
    findings: Sequence[Finding]


async def call_the_roll(config: ProxyConfig) -> RollCall:
    """Ask every source of instances once."""
    findings: list[Finding] = []
    names: dict[str, str] = {}
    transfer = KV_TRANSFERS[config.kv_transfer]()

    def changed(one: Instance, change: Change, _: Source) -> None:
        if change == "refused" and not transfer.fits(one):
            advice = "mend its kv_addr, or take it out of the configuration"
            findings.append(fail(f"{one.role} {one.url}", "--kv-transfer cannot use it", advice))
        elif change == "refused":
            advice = "have all of one kind: prefill and decode, or prefill_decode"
            seen = "takes no part: its role does not go with another instance's"
            findings.append(warn(f"{one.role} {one.url}", seen, advice))

    registry = Registry(InstanceTable(), config.instances, fits=transfer.fits, on_change=changed)
    registry.replace(Source.FILE, _in_file(config, findings))
    registry.replace(Source.API, await _registered(config, findings))
    registry.replace(Source.DNS, [one async for one in _by_name(config, names, findings)])
    instances = [one for one, *_ in registry.members]
    findings += _judge_roles(config, {one.role for one in instances})
    return RollCall(instances, names, findings)


def _in_file(config: ProxyConfig, findings: list[Finding]) -> Sequence[Instance]:
    path = config.instances_file
    if path is None:
        return ()
    try:
        raw = read_file(path)
        if raw is not None:
            return read_yaml(raw)
        seen = "it is gone"
    except (EntriesInvalid, OSError) as error:
        seen = str(error)
    findings.append(fail(f"file {path}", seen, "mend it: the proxy does not start with it"))
    return ()


async def _registered(config: ProxyConfig, findings: list[Finding]) -> Sequence[Instance]:
    if not config.dynamic_registration:
        return ()
    if config.registration_store is None:
        seen = "what is registered with a proxy that runs cannot be seen from here"
        findings.append(
            warn(
                "registration",
                seen,
                "look at GET /instances, or keep registrations in a --registration-store",
            )
        )
        return ()
    try:
        async with opened(config.registration_store) as store:
            return await store.read() or ()
    except StoreFailed as error:
        advice = "mend --registration-store: until then nobody can register"
        findings.append(fail("registration", f"the store cannot be read: {error}", advice))
        return ()


async def _by_name(
    config: ProxyConfig, names: dict[str, str], findings: list[Finding]
) -> AsyncIterator[Instance]:
    if not config.discovered:
        return
    from epd.discovery.names import Names  # noqa: PLC0415 - takes its time to load

    look_up = Names(config.discovery_dns_server).addresses
    for one in config.discovered:
        host = urlsplit(one.url).hostname or ""
        try:
            addresses = await look_up(host)
            problem = None if addresses else "it has no address"
        except LookUpFailed as error:
            addresses, problem = frozenset(), f"it cannot be looked up: {error}"
        if problem is not None:
            advice = "mend the name, or name another: --discover-…, --discovery-dns-server"
            findings.append(fail(f"{one.role} {host}", problem, advice))
        for address in sorted(addresses):
            url = at_address(one.url, address)
            names[url] = host
            yield replace(one, url=url)


def _judge_roles(config: ProxyConfig, roles: set[Role]) -> Iterator[Finding]:
    if config.dynamic_registration and config.registration_store is None:
        return  # who is registered may have them
    if not roles & set(ANSWERING):
        yield fail(
            "instances", "none decodes: every request is answered 503", "add a decode instance"
        )
    if Role.ENCODE not in roles and config.encodes:
        yield warn("instances", "none encodes", "add an encode instance")
    if Role.DECODE in roles and Role.PREFILL not in roles:
        yield warn("instances", "none prefills for those that decode", "add a prefill instance")
