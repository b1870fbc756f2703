"""Groups of settings, as the help and the documents show them."""

from collections.abc import Mapping
from fnmatch import fnmatch
from types import MappingProxyType

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "policies": "coordination",
        "skip_prefill_*": "coordination",
        "local_prefill_url": "coordination",
        "decode_choice": "coordination",
        "decode_from": "coordination",
        "decode_header": "coordination",
        "decode_hosts": "coordination",
        "decode_picker_*": "coordination",
        "*_urls": "instances",
        "ec_consumer_*": "instances",
        "kv_transfer": "instances",
        "*conversation*": "conversations",
        "*_kv_addrs": "instances",
        "ec_transfer": "instances",
        "*registration*": "instances",
        "instances_file": "instances",
        "discover*": "instances",
        "*_balance": "balance",
        "instance_weights": "balance",
        "load_interval_s": "balance",
        "session_header": "balance",
        "log_*": "logging",
        "otlp_*": "traces",
        "tenant_*": "tenants",
        "trusted_tenants": "tenants",
        "eject_*": "health of instances",
        "probe_*": "health of instances",
        "*_s": "deadlines",
        "max_*": "limits",
        "stream_interval": "limits",
        "*_rate_bytes": "limits",
        "min_*": "limits",
        "*media*": "media",
        "trust_request_mm_kwargs": "media",
        "api_keys_file": "tenants",
        "isolation": "tenants",
        "*_key_file": "secrets",
        "*_key": "secrets",
        "key_secret*": "secrets",
        "ssl_*": "TLS",
        "upstream_ca_file": "TLS",
        "allowed_origins": "CORS",
        "allowed_methods": "CORS",
        "allowed_headers": "CORS",
        "allow_credentials": "CORS",
        "*": "server",
    }
)
"""Group of a setting by pattern: the first pattern that matches its name applies."""


def group_of(name: str) -> str:
    """Return the title of a setting's group."""
    return next(title for pattern, title in GROUPS.items() if fnmatch(name, pattern))
