"""Configuration of the proxy: all settings, checked against each other. An immutable value."""

from collections.abc import Iterable, Sequence
from typing import Self

from pydantic import ValidationInfo, field_validator, model_validator

from ec_store.arena.remote_url import is_of_hosts
from epd.config.fields import check_named_once
from epd.config.sections import ConfigFields
from epd.config.sections.instances import ENCODE_SOURCES
from epd.parser import flag_of
from epd.policies.registry import Policies, make_policies
from epd.routing.instances import ANSWERING, Role
from epd.transfer.registry import KV_TRANSFERS, load_ec_transfer, load_kv_transfer

MEDIA = (
    "allowed_media_domains",
    "allow_http_media",
    "allow_private_media",
    "media_fetch_trust_env",
)
"""Rules for media. One without effect would give the operator a false sense of protection."""

NEEDS = (
    *(
        (name, "fetches_media", "--media-fetch proxy; engines have their own flags")
        for name in MEDIA
    ),
    (
        "allow_private_media",
        "allowed_media_domains",
        "--allowed-media-domains: without it, a request could reach every internal host",
    ),
    (
        "media_fetch_trust_env",
        "allowed_media_domains",
        "--allowed-media-domains: the forward proxy resolves the names, and no address is checked",
    ),
    ("registration_hosts", "dynamic_registration", "--dynamic-registration"),
    ("registration_store", "dynamic_registration", "--dynamic-registration"),
    (
        "dynamic_registration",
        "admin_api_key",
        "EPD_ADMIN_API_KEY or ADMIN_API_KEY: a registered instance gets clients' requests",
    ),
    ("kv_events", "content_roles", "--prefill-balance or --decode-balance content"),
    ("kv_events_addrs", "kv_events", "--kv-events"),
    ("ssl_ca_certs", "ssl_certfile", "--ssl-certfile"),
    # Without keys all clients are one tenant, and any client could lock out the others.
    ("tenant_max_requests", "api_keys_file", "--api-keys-file"),
    ("tenant_requests_per_minute", "api_keys_file", "--api-keys-file"),
    ("trusted_tenants", "api_keys_file", "--api-keys-file"),
)
"""Settings that need another value of the configuration, by its name and as the message says it."""


class ProxyConfig(ConfigFields):
    """Configuration of the proxy: the settings that `create_app` takes.

    Each field is a flag of `epd serve` and an environment variable `EPD_<FIELD>`. Its description
    is the flag's help.
    """

    @model_validator(mode="after")
    def _check_ec_transfer(self) -> Self:
        local = "encode_local" in self.policies
        if self.ec_store is not None and not self.encodes and not local:
            raise ValueError(
                "--ec-store needs instances that write to it: encode instances, or --servers-urls"
            )
        if self.ec_store is None and local:
            raise ValueError(
                "--servers-urls needs --ec-store, the store that the servers write to; without a "
                "store, use --decode-servers-urls"
            )
        if self.ec_store and is_of_hosts(self.ec_store) and not self.load_interval_s:
            raise ValueError(
                "--ec-store without a host needs --load-interval-s above 0: instances name the "
                "servers of their hosts on /metrics"
            )
        transfer = load_ec_transfer(self.ec_transfer)
        if self.ec_store and not transfer.stored:
            raise ValueError(
                f"--ec-store needs --ec-transfer store: with {self.ec_transfer}, encoder outputs "
                "are not in a store"
            )
        if not transfer.pushed:
            if self.ec_consumer_zmq_addrs:
                raise ValueError("--ec-consumer-zmq-addrs needs --ec-transfer mooncake")
            return self
        if self.prefill_servers_urls:
            raise ValueError(
                "--ec-transfer mooncake needs --prefill-servers-urls disable (E+PD); for prefill "
                "instances, set ec_zmq_addrs in --instances-file or at their registration"
            )
        if self.discover_prefill or self.discover_prefill_decode:
            raise ValueError(
                "--ec-transfer mooncake excludes --discover-prefill and --discover-prefill-decode: "
                "DNS does not give the addresses that receive encoder outputs"
            )
        servers = len(self.decode_servers_urls)
        expected = servers * self.ec_consumer_dp_size
        if len(self.ec_consumer_zmq_addrs) != expected:
            raise ValueError(
                "--ec-consumer-zmq-addrs must have one address per data-parallel rank of each "
                f"decode instance: {expected} ({servers} instances x {self.ec_consumer_dp_size} "
                f"ranks), not {len(self.ec_consumer_zmq_addrs)}"
            )
        _check_apart("--ec-consumer-zmq-addrs", self.ec_consumer_zmq_addrs)
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        for urls, addresses in (
            ("prefill_servers_urls", "prefill_kv_addrs"),
            ("decode_servers_urls", "decode_kv_addrs"),
        ):
            count, url_count = len(getattr(self, addresses)), len(getattr(self, urls))
            if count and count != url_count:
                raise ValueError(
                    f"{flag_of(addresses)} needs one address per URL of {flag_of(urls)}: it has "
                    f"{count} for {url_count}"
                )
        transfer = load_kv_transfer(self.kv_transfer)
        if self.conversation_store is not None and not transfer.bidirectional:
            able = [name for name, other in KV_TRANSFERS.items() if other.bidirectional]
            raise ValueError(
                f"--conversation-store needs --kv-transfer {' or '.join(able)}: with "
                f"{self.kv_transfer}, prefill cannot read decode's KV blocks of a conversation"
            )
        for instance in self.instances:
            try:
                transfer.check(instance)
            except ValueError as error:
                addrs = "prefill" if instance.role is Role.PREFILL else "decode"
                raise ValueError(f"{instance.url}: --{addrs}-kv-addrs: {error}") from None
        if transfer.named_apart:
            both = (*self.prefill_kv_addrs, *self.decode_kv_addrs)
            _check_apart("--prefill-kv-addrs, --decode-kv-addrs", both)
        return self

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        sources = (
            "another source of these instances: --dynamic-registration, --instances-file, "
            "--discover-…"
        )
        named = self.model_fields_set & {"encode_servers_urls", "servers_urls"}
        if not self.encodes and not named:
            raise ValueError(
                f"--encode-servers-urls is required ('disable' for none), or {sources}"
            )
        decodes = any(
            (
                self.decode_servers_urls,
                self.servers_urls,
                self.discover_decode,
                self.discover_prefill_decode,
            )
        )
        if not (decodes or self.dynamic_registration or self.instances_file):
            if self.decode_from == "table":
                raise ValueError(f"--decode-servers-urls is required, or {sources}")
            if not self.decode_hosts:
                raise ValueError(
                    "without --decode-servers-urls, --decode-hosts is required: the hosts that may "
                    "be named to decode"
                )
        return self

    @field_validator("policies")
    @classmethod
    def _defaults(cls, policies: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Return the policies of the settings above, then those that the instances allow."""
        if policies:
            return policies
        above = info.data.get
        settings = {
            "pd_only": above("skip_prefill_below_tokens") or above("skip_prefill_for_text"),
            "prefill_local_decode_remote": above("local_prefill_url"),
            "cost": above("encode_below_pixels"),
        }
        if settings["prefill_local_decode_remote"] and settings["cost"]:
            raise ValueError("--encode-below-pixels and --local-prefill-url exclude each other")
        encodes = any(above(name) for name in ENCODE_SOURCES)
        stages: tuple[str, ...] = ("prefill_decode",)
        if encodes:
            stages = ("encode_prefill_decode", "encode_pd")
        elif above("servers_urls"):
            stages = ("encode_local",)
        return (*(name for name, value in settings.items() if value), *stages)

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        make_checked_policies(self)
        return self

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name, needed, text in NEEDS:
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(f"{flag_of(name)} needs {text}")
        return self


def _check_apart(flags: str, addresses: Sequence[str]) -> None:
    """Raise an error for an address of two instances: one would get the other's data."""
    try:
        check_named_once(addresses)
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from None


def make_checked_policies(config: ConfigFields) -> Policies:
    """Return the policies of a configuration.

    Raises:
        ValueError: a policy is unknown or cannot be used.
    """
    first = next(iter(config.prefill_servers_urls), None)
    local = config.local_prefill_url or first
    made = make_policies(config.policies, vars(config) | {"local_prefill_url": local})
    policies = Policies(made)
    if not config.dynamic:
        if "prefill_local_decode_remote" in made and local not in config.prefill_servers_urls:
            raise ValueError(f"--local-prefill-url {local} must be one of --prefill-servers-urls")
        roles = frozenset(instance.role for instance in config.instances)
        if config.decode_from == "header" and roles.isdisjoint(ANSWERING):
            roles |= {Role.DECODE}  # clients name decode instances
        policies.check_suited(roles, pushed=load_ec_transfer(config.ec_transfer).pushed)
    return policies


class ConfigInvalid(ValueError):
    """Error for invalid settings.

    Attributes:
        reasons: all errors, one line each, with the place of the setting and without secrets.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))
