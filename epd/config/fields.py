"""Types of the settings' values: the parsing and the validation of each."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode
from yarl import URL

from epd.json_or_none import json_or_none
from epd.routing.urls import (
    base_url,
    check_pattern,
    conversation_store_url,
    name_server,
    named_events_address,
    registration_store_url,
    service_url,
    weight_of,
    zmq_address,
)
from epd.tenants import KEY, NAME

NO_INSTANCES = frozenset({"", "disable", "none"})
"""Spellings of an empty URL list, as in vLLM's `disagg_epd_proxy.py`."""

TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
"""Name of a header or a method (RFC 9110, token), up to 64 characters."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,\"]+")
"""Origin of a web page as browsers write it: only scheme, host and port."""

ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
"""Path with only one spelling: no percent-encoding, and no segment that begins with a dot."""

MIN_SECRET = 16
"""Minimum length of a secret in characters. A reader of the store could try all shorter ones."""


def _split_urls(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.strip().lower() in NO_INSTANCES:
        return ()
    return tuple(url.strip() for url in value.split(",") if url.strip())


def _split_addresses(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(address.strip() for address in value.split(",")) if value.strip() else ()


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    checked = tuple(map(base_url, urls))
    _check_named_once(checked)
    return checked


def _check_named_once(urls: Sequence[str]) -> None:
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url!r} is named twice")


def _check_secret(secret: SecretStr) -> SecretStr:
    if len(secret) < MIN_SECRET:
        raise ValueError(f"must have at least {MIN_SECRET} characters")
    return secret


def _check_admin_key(key: SecretStr) -> SecretStr:
    if KEY.fullmatch(key.get_secret_value()) is None:
        raise ValueError("must have 16 to 512 printable ASCII characters and no space")
    return key


def _split_domains(value: Any) -> Any:
    if not value:
        return ()
    return value.split(",") if isinstance(value, str) else value


def _check_domain(domain: str) -> str:
    """Return the host as `yarl.URL.raw_host` spells it."""
    name = domain.strip()
    try:
        host = URL.build(scheme="https", host=name.strip("[]")).raw_host
    except ValueError:
        host = None
    if not host or set(name) & set("*/@% "):
        raise ValueError(f"{domain!r} is not a host name such as media.example.com")
    return host.rstrip(".")


def _check_header_name(name: str) -> str:
    if TOKEN.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a header")
    return name.lower()


def _json_list(value: Any) -> Any:
    """Return the items of a JSON list, as in vLLM's flags. A YAML list is already parsed."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return ()
    listed = json_or_none(value)
    if not isinstance(listed, list):
        raise ValueError(f'{value!r} is not a JSON list such as ["*"]')  # noqa: TRY004 - pydantic's
    return tuple(listed)


def _check_origin(origin: str) -> str:
    # "null" is invalid: every sandboxed page, of any site, has this origin.
    if origin != "*" and ORIGIN.fullmatch(origin) is None:
        raise ValueError(
            f"{origin!r} is not an origin such as https://chat.example.com, in lower case and "
            "without a path, or *"
        )
    return origin


def _check_token(name: str) -> str:
    if TOKEN.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a method or a header")
    return name


def _check_root_path(path: str | None) -> str | None:
    stripped = (path or "").rstrip("/")
    if stripped and ROOT_PATH.fullmatch(stripped) is None:
        raise ValueError(f"{path!r} is not a path such as /vllm, of A-Z a-z 0-9 . _ ~ - and /")
    return stripped or None


def _check_tenant(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a tenant: up to 64 of A-Z a-z 0-9 . _ -")
    return name


def _check_weights(weights: tuple[str, ...]) -> tuple[str, ...]:
    _check_named_once([url for url, _ in map(weight_of, weights)])
    return weights


def _check_event_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    urls = [url for url, _ in map(named_events_address, addresses)]
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"names {url!r} twice" if url else "has two addresses without a URL")
    return addresses


def _check_name_server(server: str) -> str:
    name_server(server)
    return server


def _if_set(check: Callable[[Any], object]) -> AfterValidator:
    return AfterValidator(lambda value: None if value is None else check(value))


_OR_NONE = BeforeValidator(lambda value: value or None)
_URL_OR_NONE = BeforeValidator(lambda url: None if url in NO_INSTANCES else url)
_STORE_OR_NONE = BeforeValidator(lambda url: None if url in {*NO_INSTANCES, "memory"} else url)

KeySecret = Annotated[SecretStr | None, _OR_NONE, _if_set(_check_secret)]
AdminKey = Annotated[SecretStr | None, _OR_NONE, _if_set(_check_admin_key)]
Secret = Annotated[SecretStr | None, _OR_NONE]
DnsServer = Annotated[str | None, _OR_NONE, _if_set(_check_name_server)]
StoreUrl = Annotated[str | None, _URL_OR_NONE]
EndpointUrl = Annotated[str | None, _URL_OR_NONE, _if_set(base_url)]
RegistrationStore = Annotated[str | None, _URL_OR_NONE, _if_set(registration_store_url)]
ConversationStore = Annotated[str | None, _STORE_OR_NONE, _if_set(conversation_store_url)]
RootPath = Annotated[str | None, AfterValidator(_check_root_path)]
HeaderName = Annotated[str, AfterValidator(_check_header_name)]

T = TypeVar("T")

_UrlList = Annotated[tuple[T, ...], NoDecode, BeforeValidator(_split_urls)]
_AddressList = Annotated[tuple[T, ...], NoDecode, BeforeValidator(_split_addresses)]
_DomainList = Annotated[tuple[T, ...], NoDecode, BeforeValidator(_split_domains)]
_JsonList = Annotated[tuple[T, ...], NoDecode, BeforeValidator(_json_list)]

Urls = Annotated[_UrlList[str], AfterValidator(_check_urls)]
Services = Annotated[
    _UrlList[Annotated[str, AfterValidator(service_url)]], AfterValidator(_check_urls)
]
ZmqAddresses = _UrlList[Annotated[str, AfterValidator(zmq_address)]]
Weights = Annotated[_UrlList[str], AfterValidator(_check_weights)]
PolicyNames = _UrlList[str]
Addresses = _AddressList[str]
"""Addresses, one per instance; an empty one stands for an instance that needs no address."""
EventAddresses = Annotated[_AddressList[str], AfterValidator(_check_event_addresses)]
TenantNames = _AddressList[Annotated[str, AfterValidator(_check_tenant)]]
Domains = _DomainList[Annotated[str, AfterValidator(_check_domain)]]
HostPatterns = _DomainList[Annotated[str, AfterValidator(check_pattern)]]
Origins = _JsonList[Annotated[str, AfterValidator(_check_origin)]]
Methods = _JsonList[Annotated[str, AfterValidator(_check_token)]]
HeaderNames = Methods

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def flag_of(field: str) -> str:
    """Return the flag of a setting."""
    return "--" + field.replace("_", "-")
