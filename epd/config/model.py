"""What can be set, all of it."""

from typing import Self

import orjson
from pydantic import SecretStr, model_validator

<<<<<<< /tmp/tmpflvntrs5
from epd.config.parts.limits import LimitSettings
from epd.config.parts.media import MediaSettings
from epd.config.parts.routes import RouteSettings
from epd.config.parts.serving import ServingSettings
from epd.config.parts.tenancy import TenancySettings
from epd.config.parts.transfers import TransferSettings
||||||| /tmp/tmpor5m48ts
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
from epd.routing.balance import BalanceName, ItemBalanceName
from epd.routing.health import HealthPolicy
from epd.routing.instances import Instance, Role
from epd.routing.weights import weight_of
from epd.tenants import ANONYMOUS, Scope, Tenant
from epd.transfer.flavours import EC_TRANSFERS, KV_TRANSFERS, ECTransferName, KVTransferName
=======
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
>>>>>>> /tmp/tmpyvxq5z_w


class ProxyConfig(
    TransferSettings, RouteSettings, TenancySettings, MediaSettings, LimitSettings, ServingSettings
):
    """Everything `create_app` needs to know.

    Each field is a flag of `epd serve` and an environment variable `EPD_<FIELD>`; its
    description is the flag's help.
    """

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.dynamic_registration and self.admin_api_key is None:
            raise ValueError(
                "--dynamic-registration needs EPD_ADMIN_API_KEY or ADMIN_API_KEY: who registers an "
                "instance reads what it is sent"
            )
        return self

    def to_json(self) -> bytes:
        """All of it, secrets in plain text: for another process of the same proxy alone."""
        values = {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in self
        }
        return orjson.dumps(values, default=str)
<<<<<<< /tmp/tmpflvntrs5
||||||| /tmp/tmpor5m48ts

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
=======

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
>>>>>>> /tmp/tmpyvxq5z_w
