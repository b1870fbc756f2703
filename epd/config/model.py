"""What can be set, with its defaults and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from epd.config.fields import (
    NO_INSTANCES,
    Addresses,
    AdminKey,
    ConversationStore,
    DnsServer,
    Domains,
    EndpointUrl,
    HeaderName,
    HostPatterns,
    KeySecret,
    PolicyNames,
    RegistrationStore,
    Seconds,
    SecondsOrNone,
    Secret,
    Services,
    StoreUrl,
    Urls,
    Weights,
    ZmqAddresses,
)
from epd.policies.active import Active, activate
from epd.policies.course import DecodeChoice, DecodeFrom
from epd.policies.suited import check_suited
from epd.routing.balance import BalanceName, ItemBalanceName
from epd.routing.health import HealthPolicy
from epd.routing.instances import Instance, Role
from epd.routing.weights import weight_of
from epd.tenants import ANONYMOUS, Scope, Tenant
from epd.transfer.flavours import EC_TRANSFERS, KV_TRANSFERS, ECTransferName, KVTransferName


class ProxyConfig(BaseModel):
    """Everything `create_app` needs to know.

    Each field is a flag of `epd serve` and an environment variable `EPD_<FIELD>`; its
    description is the flag's help.
    """

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
    ec_transfer: ECTransferName = Field(
        default="store",
        description="how prefill gets encoder outputs: the connector of the instances' "
        "--ec-transfer-config, ECStoreConnector, ECExampleConnector, ECCPUConnector with "
        "ec_enable_nixl, or ECMooncakeConnector, which --ec-consumer-zmq-addrs selects by itself",
    )
    ec_consumer_zmq_addrs: ZmqAddresses = Field(
        default=(),
        description="where decode instances, which prefill too, take encoder outputs with "
        "Mooncake: tcp://host:port for each, in the order of --decode-servers-urls, "
        "comma-separated; with --ec-consumer-dp-size all ranks of one before the next",
    )
    kv_transfer: KVTransferName = Field(
        default="nixl",
        description="how decode gets prefill's KV blocks: the connector of the instances' "
        "--kv-transfer-config",
    )
    policies: PolicyNames = Field(
        default=(),
        description="what runs where for a request: policies by name, comma-separated, the first "
        "one that has something to say of a request decides; with options of their own as in "
        "'pd_only?decode_choice=early'; default: as the instances suggest",
    )
    skip_prefill_below_tokens: int = Field(
        default=0,
        ge=0,
        description="prompts of text, of fewer tokens by estimate, that decode prefills itself "
        "(policy pd_only); 0: none",
    )
    skip_prefill_for_text: bool = Field(
        default=False, description="let decode prefill all prompts without media (policy pd_only)"
    )
    local_prefill_url: EndpointUrl = Field(
        default=None,
        description="prefill instance beside the proxy (policy prefill_local_decode_remote); "
        "with that policy the first one by default",
    )
    decode_choice: DecodeChoice = Field(
        default="late",
        description="when the decode instance is chosen: once prefill has answered, or before it "
        "is asked",
    )
    decode_from: DecodeFrom = Field(
        default="table",
        description="who names the decode instance: the proxy of those it knows, the client by "
        "--decode-header where it sends one, or the service at --decode-picker-url",
    )
    decode_header: HeaderName = Field(
        default="x-decoder-host-port",
        description="header by which a client names the decode instance, as host:port, with "
        "--decode-from header",
    )
    decode_hosts: HostPatterns = Field(
        default=(),
        description="hosts that a header or a picker may name beside the instances that the proxy "
        "knows, comma-separated: names, *.domain, networks",
    )
    decode_picker_url: EndpointUrl = Field(
        default=None, description="endpoint picker that is asked, with --decode-from picker"
    )
    decode_picker_timeout_s: Seconds = Field(default=0.5, description="the picker's answer")
    conversation_store: ConversationStore = Field(
        default=None,
        description="where is kept what the turns of a conversation leave for the next: memory, or "
        "redis://host for several proxies or workers",
    )
    conversation_ttl: Seconds = Field(
        default=450.0,
        description="how long, in seconds: below the decode instances' decoder_kv_blocks_ttl (480) "
        "by more than 5",
    )
    conversation_budget_s: Seconds = Field(
        default=0.05, description="a look-up there; after it the conversation is computed anew"
    )
    max_conversations: int = Field(
        default=10_000, ge=0, description="conversations kept in memory, of one process"
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
    host: str = Field(default="0.0.0.0", description="address to listen on")  # noqa: S104
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    workers: int = Field(
        default=1, ge=1, description="processes that serve it; one uses one core at most"
    )
    ssl_certfile: Path | None = Field(
        default=None,
        description="certificate, and its chain, that clients are served over TLS with",
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="its private key, without passphrase"
    )
    ssl_ca_certs: Path | None = Field(
        default=None, description="CAs that clients' own certificates must be from"
    )
    ssl_cert_reqs: int = Field(
        default=0,
        ge=0,
        le=2,
        description="clients' own certificates: 0 none, 1 optional, 2 required",
    )
    upstream_ca_file: Path | None = Field(
        default=None,
        description="CAs that the certificates of https instances must be from; without it the "
        "system's",
    )

    ec_store: StoreUrl = Field(
        default=None,
        description="the encode instances' encoder-cache store, such as file:///dev/shm/ec or "
        "redis://host: what it has is not encoded again; 'none': it is not asked",
    )
    ec_store_budget_s: Seconds = Field(
        default=0.02, description="a look-up in the store; after it everything is encoded"
    )
    ec_store_lease_s: Seconds = Field(
        default=30.0, description="how long what was looked up is safe from eviction"
    )
    encode_balance: ItemBalanceName = Field(
        default="affinity",
        description="which encode instance an item goes to: always the same one within a bounded "
        "load (affinity: for each item, session: for each session), each in turn, the one with the "
        "least to do, or of two at random the one with less",
    )
    prefill_balance: BalanceName = Field(
        default="least_load", description="the same of prefill instances"
    )
    decode_balance: BalanceName = Field(
        default="least_load", description="the same of decode instances"
    )
    instance_weights: Weights = Field(
        default=(),
        description="how much is for an instance beside others, 1 unless it is said: URL=WEIGHT, "
        "comma-separated; 0: nothing new, unless nobody else can",
    )
    load_interval_s: SecondsOrNone = Field(
        default=1.0,
        description="between two questions to an instance how many requests are waiting and "
        "running (its /metrics); 0: it is not asked",
    )
    session_header: HeaderName = Field(
        default="x-session-id",
        description="the request header that says which session a request is one of",
    )
    on_encode_failure: Literal["local", "fail"] = Field(
        default="local",
        description="what becomes of an item that no encode instance could encode: prefill or "
        "decode get the media and encode them, or the request fails",
    )
    on_prefill_failure: Literal["local", "fail"] = Field(
        default="local",
        description="what becomes of a request that no prefill instance could prefill: decode gets "
        "the media and does it, or the request fails",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="file of lines tenant:sha256, as `epd hash-key` prints them; with it, "
        "clients need a key, and theirs do not go on to the instances",
    )
    isolation: Literal["tenant", "shared"] = Field(
        default="tenant",
        description="whether each tenant has cache entries of its own or all share theirs; "
        "it matters with --api-keys-file alone",
    )
    key_secret: KeySecret = Field(
        default=None,
        description="what keys and salts are derived with, beside the tenant's name",
    )
    admin_api_key: AdminKey = Field(
        default=None,
        description="what opens /metrics, /ui/state, /policies, /start_profile and /stop_profile; "
        "without it they answer clients on this machine alone",
    )

    decode_media: Literal["metadata", "raw"] = Field(
        default="metadata",
        description="what prefill and decode get of a media item: placeholder metadata alone, "
        "where the encode instance reports it, or always the media",
    )
    allowed_local_media_path: Path | None = Field(
        default=None,
        description="folder that file:// media may come from, the same as the encode instances'; "
        "without it they are refused",
    )
    media_fetch: Literal["engine", "proxy"] = Field(
        default="engine",
        description="who fetches http(s) media: each engine, or the proxy, once and keyed by "
        "content",
    )
    allowed_media_domains: Domains = Field(
        default=(),
        description="hosts that the proxy fetches media from, comma-separated; without it any "
        "with a public address",
    )
    allow_http_media: bool = Field(
        default=False, description="let the proxy fetch over http too, not https alone"
    )
    allow_private_media: bool = Field(
        default=False,
        description="let the hosts of --allowed-media-domains have private addresses",
    )
    trust_request_mm_kwargs: bool = Field(
        default=False,
        description="let requests have mm_processor_kwargs and media_io_kwargs; the instances "
        "need the same flag",
    )
    media_cache_bytes: int = Field(
        default=256 * 1024**2, ge=0, description="memory for media that the proxy has fetched"
    )
    max_requests: int = Field(
        default=1024,
        ge=1,
        description="requests served at once, all workers together; more wait in a queue",
    )
    max_queue: int = Field(
        default=256, ge=0, description="requests that wait for their turn; 429 above"
    )
    max_inflight_bytes: int = Field(
        default=1024**3,
        ge=1024,
        description="request bodies in memory at once, all workers together; 503 above",
    )
    tenant_max_requests: int | None = Field(
        default=None, ge=1, description="requests of one tenant at once, waiting ones included"
    )
    tenant_requests_per_minute: int | None = Field(
        default=None, ge=1, description="requests of one tenant in a minute"
    )
    max_items: int = Field(default=64, ge=1, description="media items in one request")
    max_body_bytes: int = Field(
        default=128 * 1024**2, ge=1024, description="size of a request body"
    )
    max_media_bytes: int = Field(
        default=64 * 1024**2, ge=1, description="size of one item that the proxy fetches"
    )
    max_connections: int = Field(
        default=0,
        ge=0,
        description="clients' connections to one process; 0: what its file descriptors allow",
    )
    body_min_rate_bytes: int = Field(
        default=64 * 1024, ge=1, description="of a request body, each second, after the first 5"
    )
    max_image_pixels: int = Field(
        default=178_956_970, ge=1, description="pixels of one picture; the default is vLLM's"
    )
    min_image_side: int = Field(
        default=2, ge=0, description="width and height of one picture, in pixels"
    )

    header_timeout_s: Seconds = Field(default=10.0, description="a request head's arrival")
    keep_alive_s: Seconds = Field(
        default=75.0, description="a client's connection that waits for another request"
    )
    write_timeout_s: Seconds = Field(
        default=60.0, description="a client that does not read its answer"
    )
    queue_timeout_s: Seconds = Field(
        default=10.0, description="a request's wait for its turn; 503 after it"
    )
    body_timeout_s: Seconds = Field(default=60.0, description="a request body's arrival")
    connect_timeout_s: Seconds = Field(default=2.0, description="connecting to an instance")
    media_timeout_s: Seconds = Field(default=30.0, description="fetching one item")
    encode_timeout_s: Seconds = Field(default=30.0, description="encoding one item")
    prefill_timeout_s: Seconds = Field(default=120.0, description="the prefill stage")
    kv_lease_s: Seconds = Field(
        default=30.0,
        description="how long prefill keeps its blocks for decode (vLLM's kv_lease_duration); a "
        "request that takes half of it is logged as a warning",
    )
    first_byte_timeout_s: Seconds = Field(
        default=300.0, description="from the decode request to the first byte of its answer"
    )
    idle_timeout_s: Seconds = Field(
        default=120.0, description="silence between two chunks of the decode answer"
    )
    request_timeout_s: Seconds = Field(
        default=1800.0,
        description="a request from its body to its end; a client's x-request-timeout, in seconds, "
        "can only shorten it",
    )
    health_timeout_s: Seconds = Field(
        default=5.0, description="an instance's answer to /health and /v1/models"
    )
    probe_interval_s: Seconds = Field(
        default=5.0, description="between two probes (GET /health) of an instance that is up"
    )
    probe_backoff_s: Seconds = Field(
        default=1.0,
        description="until an instance that is down is probed again; doubled each time",
    )
    probe_backoff_max_s: Seconds = Field(default=30.0, description="the longest such wait")
    eject_after: int = Field(
        default=5, ge=1, description="failures in a row after which an instance is left alone"
    )
    eject_s: Seconds = Field(
        default=30.0, description="for how long, times how often it had to be of late"
    )
    eject_max_s: Seconds = Field(default=300.0, description="the longest such time")
    drain_delay_s: SecondsOrNone = Field(
        default=5.0, description="from SIGTERM, and /ready's 503, until no connection is taken"
    )
    drain_timeout_s: SecondsOrNone = Field(
        default=300.0, description="from then until the requests that still run are ended"
    )

    profile_timeout_s: Seconds = Field(
        default=300.0, description="an instance's answer to /start_profile and /stop_profile"
    )

    log_format: Literal["console", "json"] = Field(
        default="console", description="log lines for people or for machines"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    otlp_traces_endpoint: EndpointUrl = Field(
        default=None,
        description="OpenTelemetry collector that each request's spans are exported to, such as "
        "http://host:4317 (gRPC), or http://host:4318/v1/traces with "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf; OTEL_... variables say the rest",
    )
    openai_api_key: Secret = Field(
        default=None,
        description="key sent to the instances where the client sends no Authorization",
    )

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        sources = (
            "another source of these instances: --dynamic-registration, --instances-file, "
            "--discover-…"
        )
        if not self.encodes and "encode_servers_urls" not in self.model_fields_set:
            raise ValueError(
                f"--encode-servers-urls is required ('disable' for none), or {sources}"
            )
        decodes = self.decode_servers_urls or self.discover_decode or self.discover_prefill_decode
        found = self.dynamic_registration or self.instances_file or self._decode_is_named
        if not (decodes or found):
            raise ValueError(f"--decode-servers-urls is required, or {sources}")
        if self.ec_store is not None and not self.encodes:
            raise ValueError("--ec-store needs encode instances: nobody else writes to it")
        both = set(self.prefill_servers_urls) & set(self.decode_servers_urls)
        if both:
            raise ValueError(
                f"{min(both)!r} is named as prefill and as decode instance; an instance that does "
                "both belongs in --decode-servers-urls alone"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _push_to_addresses(cls, given: Any) -> Any:
        # A script written for vLLM's example has the addresses alone.
        addresses = given.get("ec_consumer_zmq_addrs") if isinstance(given, dict) else None
        if not addresses or str(addresses).strip().lower() in NO_INSTANCES:
            return given
        return {"ec_transfer": "mooncake", **given}

    @model_validator(mode="after")
    def _check_ec_transfer(self) -> Self:
        transfer = EC_TRANSFERS[self.ec_transfer]
        if self.ec_store and not transfer.stored:
            raise ValueError(
                f"--ec-store needs --ec-transfer store: with {self.ec_transfer}, encoder outputs "
                "are in no store that could be asked"
            )
        if not transfer.pushed:
            if self.ec_consumer_zmq_addrs:
                raise ValueError("--ec-consumer-zmq-addrs needs --ec-transfer mooncake")
            return self
        if self.prefill_servers_urls:
            raise ValueError(
                "--ec-transfer mooncake goes with --prefill-servers-urls disable (E+PD); prefill "
                "instances can say where they take encoder outputs in --instances-file, or where "
                "they register, as ec_zmq_addrs"
            )
        if self.discover_prefill or self.discover_prefill_decode:
            raise ValueError(
                "--ec-transfer mooncake does not go with --discover-prefill and "
                "--discover-prefill-decode: a name does not say where encoder outputs are taken"
            )
        servers = len(self.decode_servers_urls)
        expected = servers * self.ec_consumer_dp_size
        if len(self.ec_consumer_zmq_addrs) != expected:
            raise ValueError(
                "--ec-consumer-zmq-addrs must have one address for each data-parallel rank of each "
                f"decode instance: {expected} ({servers} instances x {self.ec_consumer_dp_size} "
                f"ranks), not {len(self.ec_consumer_zmq_addrs)}"
            )
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

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.dynamic_registration and self.admin_api_key is None:
            raise ValueError(
                "--dynamic-registration needs EPD_ADMIN_API_KEY or ADMIN_API_KEY: who registers an "
                "instance reads what it is sent"
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
    def _settle_policies(self) -> Self:
        if not self.policies:
            object.__setattr__(self, "policies", self._usual_policies)
        self.activated(self.policies)
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        for urls, addresses in (
            ("prefill_servers_urls", "prefill_kv_addrs"),
            ("decode_servers_urls", "decode_kv_addrs"),
        ):
            found, wanted = len(getattr(self, addresses)), len(getattr(self, urls))
            if found and found != wanted:
                raise ValueError(
                    f"{_flag(addresses)} needs one address for each of {_flag(urls)}: it has "
                    f"{found} for {wanted}"
                )
        transfer = KV_TRANSFERS[self.kv_transfer]()
        for instance in (*self.instances, *self.discovered):
            try:
                transfer.check(instance)
            except ValueError as error:
                raise ValueError(f"{instance.url}: --kv-transfer {error}") from None
        if transfer.needed and self.on_prefill_failure == "local":
            raise ValueError(
                f"--kv-transfer {self.kv_transfer} needs --on-prefill-failure fail: its decode "
                "instances wait for the blocks of every request"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0):
            raise ValueError(
                "--ssl-ca-certs needs --ssl-cert-reqs 1 or 2, and they need it: one without the "
                "other would verify nobody"
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-certfile")
        return self

    def to_json(self) -> bytes:
        """All of it, secrets in plain text: for another process of the same proxy alone."""
        values = {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self
        }
        return orjson.dumps(values, default=str)

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        # A policy that is set and does nothing would be taken for one that protects.
        for flag in ("allowed_media_domains", "allow_http_media", "allow_private_media"):
            if getattr(self, flag) and self.media_fetch == "engine":
                raise ValueError(
                    f"{_flag(flag)} needs --media-fetch proxy; engines have flags of their own"
                )
        if self.allow_private_media and not self.allowed_media_domains:
            raise ValueError(
                "--allow-private-media needs --allowed-media-domains: without it a request could "
                "reach every host inside"
            )
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        # Without keys all clients are one tenant, and any of them could shut out the others.
        for flag in ("tenant_max_requests", "tenant_requests_per_minute"):
            if getattr(self, flag) is not None and self.api_keys_file is None:
                raise ValueError(f"{_flag(flag)} needs --api-keys-file")
        return self

    def activated(self, policies: Sequence[str]) -> tuple[Active, ...]:
        """Policies, as they are written, with the settings that are their options.

        Raises:
            ValueError: one of them is none, or cannot be used.
        """
        local = self.local_prefill_url or next(iter(self.prefill_servers_urls), None)
        settings: Mapping[str, object] = {
            "skip_prefill_below_tokens": self.skip_prefill_below_tokens,
            "skip_prefill_for_text": self.skip_prefill_for_text,
            "local_prefill_url": local,
            "decode_choice": self.decode_choice,
            "decode_from": self.decode_from,
            "decode_picker_url": self.decode_picker_url,
        }
        active = activate(policies, settings)
        for one in active:
            url = one.options.get("local_prefill_url")
            if url is not None and url not in self.prefill_servers_urls and not self.dynamic:
                raise ValueError(f"{one.name}: {url} must be one of --prefill-servers-urls")
        if not self.dynamic:
            check_suited(
                active,
                frozenset(one.role for one in self.instances),
                pushed=EC_TRANSFERS[self.ec_transfer].pushed,
                needed=KV_TRANSFERS[self.kv_transfer].needed,
            )
        return active

    @property
    def _usual_policies(self) -> tuple[str, ...]:
        """Those that the other settings ask for, then what the instances can do."""
        asked = {
            "pd_only": self.skip_prefill_below_tokens or self.skip_prefill_for_text,
            "prefill_local_decode_remote": self.local_prefill_url,
        }
        stages = ("encode_prefill_decode", "encode_pd") if self.encodes else ("prefill_decode",)
        return (*(name for name, wanted in asked.items() if wanted), *stages)

    @property
    def _decode_is_named(self) -> bool:
        """Whether somebody else names decode instances, who may know those that nobody lists."""
        return self.decode_from != "table" or any(
            f"decode_from={other}" in one for one in self.policies for other in ("header", "picker")
        )

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
        return bool(
            self.encode_servers_urls
            or self.discover_encode
            or self.dynamic_registration
            or self.instances_file
        )

    @property
    def dynamic(self) -> bool:
        """Whether instances come and go while the proxy runs."""
        return bool(self.dynamic_registration or self.instances_file or self.discovered)

    @property
    def health(self) -> HealthPolicy:
        """When an instance is left alone, and when it is looked at again."""
        return HealthPolicy(
            eject_after=self.eject_after,
            eject_s=self.eject_s,
            max_eject_s=self.eject_max_s,
            probe_interval_s=self.probe_interval_s,
            min_backoff_s=self.probe_backoff_s,
            max_backoff_s=self.probe_backoff_max_s,
        )

    def scope_of(self, tenant: Tenant) -> Scope:
        """What a tenant's keys and salts are derived under."""
        alone = self.isolation == "tenant" and tenant != ANONYMOUS
        return Scope(tenant if alone else None, self._secret)

    def name_scope_of(self, tenant: Tenant) -> Scope:
        """What the keys of a tenant's names are derived under: its own, whatever else is shared."""
        return Scope(tenant, self._secret)

    @property
    def _secret(self) -> bytes:
        secret = "" if self.key_secret is None else self.key_secret.get_secret_value()
        return secret.encode("utf-8", "surrogateescape")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
