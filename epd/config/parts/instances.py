"""Settings that say which instances there are, and the instances that they name."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    Addresses,
    DnsServer,
    HostPatterns,
    RegistrationStore,
    Seconds,
    Services,
    Urls,
    Weights,
    ZmqAddresses,
)
from epd.routing.instances import Instance, Role
from epd.routing.weights import weight_of

ENCODE_SOURCES = (
    "encode_servers_urls",
    "discover_encode",
    "dynamic_registration",
    "instances_file",
)
"""Fields by which there are encode instances, or may be some day."""


class InstanceSettings(BaseModel):
    """Settings that say which instances there are, and the instances that they name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encode_servers_urls: Urls = Field(
        default=(),
        description="encode instances, comma-separated; 'disable', 'none' or empty: no encode "
        "stage, media go to prefill or decode as they came (P+D)",
    )
    prefill_servers_urls: Urls = Field(
        default=(),
        description="prefill instances; 'disable', 'none' or empty: no prefill stage (E+PD)",
    )
    decode_servers_urls: Urls = Field(
        default=(), description="decode instances; without prefill instances they prefill too"
    )
    ec_consumer_dp_size: int = Field(
        default=1,
        ge=1,
        description="data-parallel ranks behind each prefill instance, or without any each decode "
        "instance; the proxy names the rank",
    )
    ec_consumer_zmq_addrs: ZmqAddresses = Field(
        default=(),
        description="where decode instances, which prefill too, take encoder outputs with "
        "Mooncake: tcp://host:port for each, in the order of --decode-servers-urls, "
        "comma-separated; with --ec-consumer-dp-size all ranks of one before the next",
    )
    prefill_kv_addrs: Addresses = Field(
        default=(),
        description="where the prefill instances' KV connectors are spoken to, one for each URL, "
        "comma-separated; for --kv-transfer mooncake (host:port of the bootstrap server, where it "
        "is not 8998 of the instance's host) and p2p-nccl (host:port)",
    )
    decode_kv_addrs: Addresses = Field(
        default=(),
        description="the same of the decode instances; for --kv-transfer lmcache (host:init:alloc, "
        "the ports of its pd_peer_...) and p2p-nccl (host:port)",
    )
    instance_weights: Weights = Field(
        default=(),
        description="how much is for an instance beside others, 1 unless it is said: URL=WEIGHT, "
        "comma-separated; 0: nothing new, unless nobody else can",
    )
    dynamic_registration: bool = Field(
        default=False,
        description="let launchers register instances (POST /instances); needs the admin key",
    )
    registration_store: RegistrationStore = Field(
        default=None,
        description="where registrations outlive the proxy, and other proxies find them: "
        "file:///a/folder or redis://host",
    )
    registration_hosts: HostPatterns = Field(
        default=(),
        description="hosts that may be registered, comma-separated: names, *.domain, networks",
    )
    instances_file: Path | None = Field(
        default=None, description="YAML file of instances that is watched"
    )
    discover_encode: Services = Field(
        default=(),
        description="encode instances: all addresses of a name, as host:port or https://host:port",
    )
    discover_prefill: Services = Field(default=(), description="the same for prefill instances")
    discover_decode: Services = Field(default=(), description="the same for decode instances")
    discover_prefill_decode: Services = Field(
        default=(), description="the same for instances that prefill and decode"
    )
    discovery_interval_s: Seconds = Field(
        default=5.0, description="between two look-ups of such a name"
    )
    discovery_dns_server: DnsServer = Field(
        default=None, description="address or address:port of the DNS server; default: the system's"
    )

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        both = set(self.prefill_servers_urls) & set(self.decode_servers_urls)
        if both:
            raise ValueError(
                f"{min(both)!r} is named as prefill and as decode instance; an instance that does "
                "both belongs in --decode-servers-urls alone"
            )
        if self.registration_hosts and not self.dynamic_registration:
            raise ValueError("--registration-hosts needs --dynamic-registration")
        if self.registration_store and not self.dynamic:
            raise ValueError(
                "--registration-store needs --dynamic-registration, --instances-file, --discover-…"
            )
        roles = {one.role for one in (*self.instances, *self.discovered)}
        if Role.PREFILL_DECODE in roles and roles & {Role.PREFILL, Role.DECODE}:
            raise ValueError(
                "instances that prefill and decode do not go with those that do one of both"
            )
        awaited = self.dynamic_registration or self.instances_file
        if Role.DECODE in roles and Role.PREFILL not in roles and not awaited:
            raise ValueError("--discover-decode needs prefill instances to go with")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        urls = {one.url for one in (*self.instances, *self.discovered)}
        for url, _ in map(weight_of, self.instance_weights):
            if url not in urls:
                raise ValueError(
                    f"--instance-weights names {url!r}, which no other flag does; instances that "
                    "are registered or in a file have a weight there"
                )
        return self

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The instances the URL lists name, with the roles the topology gives them."""
        size = self.ec_consumer_dp_size
        apart = self.prefill_servers_urls or self.discover_prefill or self.discover_decode
        role, ranks = (Role.DECODE, 1) if apart else (Role.PREFILL_DECODE, size)
        found = (
            *(Instance(Role.ENCODE, url) for url in self.encode_servers_urls),
            *(
                Instance(Role.PREFILL, url, size, kv_addr=address)
                for url, address in zip_longest(
                    self.prefill_servers_urls, self.prefill_kv_addrs, fillvalue=""
                )
            ),
            *(
                Instance(
                    role, url, ranks, kv_addr=address, ec_zmq_addrs=self._addresses_of(position)
                )
                for position, (url, address) in enumerate(
                    zip_longest(self.decode_servers_urls, self.decode_kv_addrs, fillvalue="")
                )
            ),
        )
        return tuple(map(self._weighed, found))

    def _addresses_of(self, position: int) -> tuple[str, ...]:
        """Those of the decode instance in this place, by rank."""
        size = self.ec_consumer_dp_size
        return self.ec_consumer_zmq_addrs[position * size : (position + 1) * size]

    @property
    def discovered(self) -> tuple[Instance, ...]:
        """Those that names are looked up for, which are the hosts of the URLs."""
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
        """Whether there are encode instances, or may be some day."""
        return any(getattr(self, name) for name in ENCODE_SOURCES)

    @property
    def dynamic(self) -> bool:
        """Whether instances come and go while the proxy runs."""
        return bool(self.dynamic_registration or self.instances_file or self.discovered)
