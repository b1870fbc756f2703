"""Settings of the instances: their URLs, discovery and registration."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from epd.config.fields import (
    Addresses,
    DnsServer,
    HostPatterns,
    RegistrationStore,
    Section,
    Services,
    Urls,
    Weights,
    ZmqAddresses,
)
from epd.routing.instances import Instance, Role
from epd.routing.urls import weight_of

ENCODE_SOURCES = (
    "encode_servers_urls",
    "discover_encode",
    "dynamic_registration",
    "instances_file",
)
"""Fields that name encode instances, or allow them to join later."""


class InstanceSettings(Section):
    """Fields for the instances, with their validation and the instances that they name."""

    encode_servers_urls: Urls = ()
    """URLs of the encode instances, comma-separated; 'disable', 'none' or empty: no encode stage,
    prefill or decode gets the media unchanged (P+D)"""
    prefill_servers_urls: Urls = ()
    """URLs of the prefill instances, comma-separated; 'disable', 'none' or empty: no prefill stage
    (E+PD)"""
    decode_servers_urls: Urls = ()
    """URLs of the decode instances, comma-separated; without prefill instances, they prefill too"""
    servers_urls: Urls = ()
    """URLs of vLLM servers that encode, prefill and decode, comma-separated, in place of the lists
    above; they use the store of --ec-store with ec_role ec_both"""
    ec_consumer_dp_size: int = Field(default=1, ge=1)
    """data-parallel ranks of each prefill instance, or of each decode instance if there is no
    prefill stage; the proxy selects the rank of each request"""
    ec_consumer_zmq_addrs: ZmqAddresses = ()
    """addresses at which decode instances that also prefill receive encoder outputs with Mooncake:
    tcp://host:port, comma-separated, one per instance in the order of --decode-servers-urls; with
    --ec-consumer-dp-size, one per rank, all ranks of an instance in a row"""
    prefill_kv_addrs: Addresses = ()
    """addresses of the prefill instances' KV connectors, comma-separated, one per URL; for
    --kv-transfer mooncake (host:port of the bootstrap server; default: port 8998 of the instance's
    host)"""
    decode_kv_addrs: Addresses = ()
    """addresses of the decode instances' KV connectors, comma-separated, one per URL; for
    --kv-transfer lmcache (host:init:alloc, the ports of its pd_peer_...)"""
    instance_weights: Weights = ()
    """relative weight per instance, URL=WEIGHT, comma-separated; default: 1 each; 0 drains an
    instance: no new requests unless no other instance is available"""
    dynamic_registration: bool = False
    """allow launchers to register instances (POST /instances); needs the admin key"""
    registration_store: RegistrationStore = None
    """Redis for registrations, redis://host or rediss://host: they survive a restart and are shared
    with other proxies; default: memory of this proxy"""
    registration_hosts: HostPatterns = ()
    """hosts that may be registered, comma-separated: names, *.domain, networks; default: all"""
    instances_file: Path | None = None
    """YAML file with instances; changes of the file need no restart"""
    discover_encode: Services = ()
    """DNS names of encode instances, comma-separated, as host:port or https://host:port; each
    address of a name is an instance"""
    discover_prefill: Services = ()
    """DNS names of prefill instances, as for --discover-encode"""
    discover_decode: Services = ()
    """DNS names of decode instances, as for --discover-encode"""
    discover_prefill_decode: Services = ()
    """DNS names of instances that prefill and decode, as for --discover-encode"""
    discovery_dns_server: DnsServer = None
    """address or address:port of the DNS server; default: the system's"""

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        both = set(self.prefill_servers_urls) & set(self.decode_servers_urls)
        if both:
            raise ValueError(
                f"{min(both)!r} is listed as prefill and as decode instance; list an instance that "
                "does both only in --decode-servers-urls"
            )
        if self.servers_urls and (self.prefill_servers_urls or self.decode_servers_urls):
            raise ValueError(
                "--servers-urls names servers that prefill and decode: it replaces "
                "--prefill-servers-urls and --decode-servers-urls"
            )
        roles = {instance.role for instance in (*self.instances, *self.discovered_instances)}
        if Role.PREFILL_DECODE in roles and roles & {Role.PREFILL, Role.DECODE}:
            raise ValueError(
                "instances that prefill and decode cannot be combined with instances that do only "
                "one of them"
            )
        awaited = self.dynamic_registration or self.instances_file
        if Role.DECODE in roles and Role.PREFILL not in roles and not awaited:
            raise ValueError(
                "--discover-decode needs prefill instances; for instances that do "
                "both, use --discover-prefill-decode"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        urls = {instance.url for instance in (*self.instances, *self.discovered_instances)}
        for url, _ in map(weight_of, self.instance_weights):
            if url not in urls:
                raise ValueError(
                    f"--instance-weights names {url!r}, which no other flag names; set the weight "
                    "of registered instances and of those in a file there"
                )
        return self

    @property
    def instances(self) -> tuple[Instance, ...]:
        size = self.ec_consumer_dp_size
        apart = self.prefill_servers_urls or self.discover_prefill or self.discover_decode
        role, ranks = (Role.DECODE, 1) if apart else (Role.PREFILL_DECODE, size)
        prefills = zip_longest(self.prefill_servers_urls, self.prefill_kv_addrs, fillvalue="")
        decode_urls = self.decode_servers_urls or self.servers_urls
        decodes = zip_longest(decode_urls, self.decode_kv_addrs, fillvalue="")
        found = (
            *(Instance(Role.ENCODE, url) for url in self.encode_servers_urls),
            *(Instance(Role.PREFILL, url, size, kv_addr=address) for url, address in prefills),
            *(
                Instance(
                    role,
                    url,
                    ranks,
                    kv_addr=address,
                    ec_zmq_addrs=self.ec_consumer_zmq_addrs[position * size :][:size],
                )
                for position, (url, address) in enumerate(decodes)
            ),
        )
        return tuple(map(self._weighed, found))

    @property
    def discovered_instances(self) -> tuple[Instance, ...]:
        """Return one instance per DNS name to look up; the host of its URL is the name."""
        size = self.ec_consumer_dp_size
        found = (
            *(Instance(Role.ENCODE, url) for url in self.discover_encode),
            *(Instance(Role.PREFILL, url, size) for url in self.discover_prefill),
            *(Instance(Role.DECODE, url) for url in self.discover_decode),
            *(Instance(Role.PREFILL_DECODE, url, size) for url in self.discover_prefill_decode),
        )
        return tuple(map(self._weighed, found))

    def _weighed(self, instance: Instance) -> Instance:
        weight = dict(map(weight_of, self.instance_weights)).get(instance.url)
        return instance if weight is None else replace(instance, weight=weight)

    @property
    def encodes(self) -> bool:
        return any(getattr(self, name) for name in ENCODE_SOURCES)

    @property
    def dynamic(self) -> bool:
        return bool(self.dynamic_registration or self.instances_file or self.discovered_instances)
