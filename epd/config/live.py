"""Configuration in force: an immutable value, which a reload replaces as a whole."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from epd.config.proxy_config import ProxyConfig

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
        "kv_events",
    }
)
"""Fields that are read only at the start: a change needs a restart."""


class ConfigInvalid(ValueError):
    """Error for invalid settings.

    Attributes:
        reasons: all errors, one line each, with the place of the setting and without secrets.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


Follower = Callable[[ProxyConfig, ProxyConfig], None]
"""Function called with the new configuration and the previous one."""


@dataclass(frozen=True, slots=True)
class Change:
    """Result of a reload.

    Attributes:
        before: previous configuration.
        changed: fields with a new value.
        kept: fields that need a restart for their new value; the old value stays in force.
    """

    before: ProxyConfig
    changed: frozenset[str]
    kept: frozenset[str]


class LiveConfig:
    """Holder of the configuration in force.

    A request reads `current` once, at its start, and uses that value to its end
    (`RequestContext.config`). Objects that requests share read it whenever they need a value.
    Objects with state derived from it are followers.

    Attributes:
        current: configuration in force.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.current = config
        self._followers: list[Follower] = []

    def add_follower(self, follower: Follower) -> None:
        """Call a follower at each change, once the new configuration is in force."""
        self._followers.append(follower)

    def apply_config(self, wanted: ProxyConfig) -> Change:
        """Put the reloadable fields of a configuration in force.

        Raises:
            ConfigInvalid: the new values conflict with old values that need a restart. Nothing
                was changed.
        """
        before = self.current
        differing = {name for name, value in wanted if value != getattr(before, name)}
        kept = {name: getattr(before, name) for name in differing & FIXED}
        try:
            ProxyConfig.model_validate(dict(wanted) | kept)
        except ValidationError as invalid:
            needed = ", ".join(sorted(kept))
            raise ConfigInvalid(
                f"{needed} cannot change without a restart, and with the old value "
                f"{error['msg'].removeprefix('Value error, ')}"
                for error in invalid.errors(include_input=False)
            ) from None
        changed = frozenset(differing.difference(kept))
        if changed:
            self.current = wanted.model_copy(update=kept)
            for follower in self._followers:
                follower(self.current, before)
        return Change(before, changed, frozenset(kept))
