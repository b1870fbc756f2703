"""The configuration in force, which a reload may change under those who read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from epd.config.invalid import ConfigInvalid
from epd.config.model import ProxyConfig

FIXED = frozenset(
    {
        "host",
        "port",
        "uds",
        "root_path",
        "workers",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "upstream_ca_file",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allow_credentials",
        "ec_store",
        "api_keys_file",
        "isolation",
        "key_secret",
        "log_format",
        "otlp_traces_endpoint",
        "dynamic_registration",
        "registration_store",
        "registration_hosts",
        "instances_file",
        "discover_encode",
        "discover_prefill",
        "discover_decode",
        "discover_prefill_decode",
        "discovery_interval_s",
        "discovery_dns_server",
        "ec_consumer_dp_size",
        "kv_transfer",
        "conversation_store",
        "ec_transfer",
    }
)
"""Fields that are read at the start alone."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload has done.

    Attributes:
        before: what was in force.
        changed: fields that have another value now.
        kept: fields that would, and need a restart for it.
    """

    before: ProxyConfig
    changed: frozenset[str]
    kept: frozenset[str]


class LiveConfig(ProxyConfig):
    """One object for as long as a process runs; new values are in it after a reload.

    Whoever keeps the object, and reads a field when it is needed, need not be told. It changes
    between two steps of the event loop, all fields at once.
    """

    @classmethod
    def of(cls, config: ProxyConfig) -> "LiveConfig":
        """The same values, which may change."""
        return cls.model_construct(**dict(config))

    def adopt(self, wanted: ProxyConfig) -> Change:
        """Take over what can be.

        Raises:
            ConfigInvalid: it does not go together with what needs a restart. Nothing has changed.
        """
        before = ProxyConfig.model_construct(**dict(self))
        differing = {name for name, value in wanted if value != getattr(self, name)}
        kept = differing & FIXED
        values = {name: getattr(self, name) if name in kept else value for name, value in wanted}
        try:
            ProxyConfig.model_validate(values)
        except ValidationError as invalid:
            needed = ", ".join(sorted(kept))
            raise ConfigInvalid(
                f"{needed} cannot change without a restart, and with the old value "
                f"{error['msg'].removeprefix('Value error, ')}"
                for error in invalid.errors(include_input=False)
            ) from None
        self.become(values)
        return Change(before, frozenset(differing - kept), frozenset(kept))

    def become(self, values: Mapping[str, Any]) -> None:
        """Have these values, by field, which have been checked."""
        self.__dict__.update(values)
