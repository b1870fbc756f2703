"""Types of the settings' values: the parsing and the validation of each."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr
from yarl import URL

from ec_store.urls import check_proxy_url
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
from epd.transfer.registry import load_ec_transfer, load_kv_transfer

NO_INSTANCES = frozenset({"", "disable", "none"})
"""Spellings of an empty URL list, as in vLLM's `disagg_epd_proxy.py`."""

TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
"""Name of a header or a method (RFC 9110, token), up to 64 characters."""

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@*,\"]+")
"""Origin of a web page as browsers write it: only scheme, host and port. `null` is invalid: every
sandboxed page, of any site, has this origin."""

ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
"""Path with only one spelling: no percent-encoding, and no segment that begins with a dot."""

MIN_SECRET = 16
"""Minimum length of a secret in characters. A reader of the store could try all shorter ones."""


def _from_text(read: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads text; values of other types, as of YAML, stay as they are."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _split_urls(text: str) -> tuple[str, ...]:
    if text.strip().lower() in NO_INSTANCES:
        return ()
    return tuple(url.strip() for url in text.split(",") if url.strip())


def _split_all(text: str) -> tuple[str, ...]:
    return _split_hosts(text.strip())


def _split_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a list. Only an empty text is an empty list, which allows every host."""
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _json_list(text: str) -> tuple[Any, ...]:
    """Return the items of a JSON list, as in vLLM's flags."""
    listed = json_or_none(text) if text.strip() else []
    if not isinstance(listed, list):
        raise ValueError(f'{text!r} is not a JSON list such as ["*"]')  # noqa: TRY004 - pydantic's
    return tuple(listed)


def check_named_once(names: Sequence[str]) -> None:
    """Raise `ValueError` for a name that appears twice. Empty names may."""
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice")


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    checked = tuple(map(base_url, urls))
    check_named_once(checked)
    return checked


def _check_secret(secret: SecretStr) -> None:
    if len(secret) < MIN_SECRET:
        raise ValueError(f"must have at least {MIN_SECRET} characters")


def _check_admin_key(key: SecretStr) -> None:
    if KEY.fullmatch(key.get_secret_value()) is None:
        raise ValueError("must have 16 to 512 printable ASCII characters and no space")


def _check_domain(name: str) -> str:
    """Return the host as `yarl.URL.raw_host` spells it."""
    try:
        host = URL.build(scheme="https", host=name.strip("[]")).raw_host
    except ValueError:
        host = None
    if not host or set(name) & set("*/@% "):
        raise ValueError(f"{name!r} is not a host name such as media.example.com")
    return host.rstrip(".")


def _check_root_path(path: str | None) -> str | None:
    stripped = (path or "").rstrip("/")
    if stripped and ROOT_PATH.fullmatch(stripped) is None:
        raise ValueError(f"{path!r} is not a path such as /vllm, of A-Z a-z 0-9 . _ ~ - and /")
    return stripped or None


def _check_weights(weights: tuple[str, ...]) -> None:
    check_named_once([url for url, _ in map(weight_of, weights)])


def _check_event_addresses(addresses: tuple[str, ...]) -> None:
    urls = [url for url, _ in map(named_events_address, addresses)]
    if urls.count("") > 1:
        raise ValueError("has two addresses without a URL")
    check_named_once(urls)


def _matches(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> None:
        if pattern.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not {what}")

    return _accepted_by(check)


def _if_set(read: Callable[[Any], object]) -> AfterValidator:
    return AfterValidator(lambda value: None if value is None else read(value))


def _accepted_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that keeps the value, unless it is set and a function rejects it."""

    def checked(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return AfterValidator(checked)


_OR_NONE = BeforeValidator(lambda value: value or None)
_URL_OR_NONE = BeforeValidator(lambda url: None if url in NO_INSTANCES else url)
_STORE_OR_NONE = BeforeValidator(lambda url: None if url in {*NO_INSTANCES, "memory"} else url)

KeySecret = Annotated[SecretStr | None, _OR_NONE, _accepted_by(_check_secret)]
AdminKey = Annotated[SecretStr | None, _OR_NONE, _accepted_by(_check_admin_key)]
Secret = Annotated[SecretStr | None, _OR_NONE]
DnsServer = Annotated[str | None, _OR_NONE, _accepted_by(name_server)]
KVTransferName = Annotated[str, _accepted_by(load_kv_transfer)]
ECTransferName = Annotated[str, _accepted_by(load_ec_transfer)]
StoreUrl = Annotated[str | None, _URL_OR_NONE, _if_set(check_proxy_url)]
EndpointUrl = Annotated[str | None, _URL_OR_NONE, _if_set(base_url)]
RegistrationStore = Annotated[str | None, _URL_OR_NONE, _if_set(registration_store_url)]
ConversationStore = Annotated[str | None, _STORE_OR_NONE, _if_set(conversation_store_url)]
RootPath = Annotated[str | None, AfterValidator(_check_root_path)]
HeaderName = Annotated[str, _matches(TOKEN, "the name of a header"), AfterValidator(str.lower)]

T = TypeVar("T")

_UrlList = Annotated[tuple[T, ...], _from_text(_split_urls)]
_List = Annotated[tuple[T, ...], _from_text(_split_all)]
_HostList = Annotated[tuple[T, ...], _from_text(_split_hosts)]
_JsonList = Annotated[tuple[T, ...], _from_text(_json_list)]

Urls = Annotated[_UrlList[str], AfterValidator(_check_urls)]
Services = Annotated[
    _UrlList[Annotated[str, AfterValidator(service_url)]], AfterValidator(_check_urls)
]
ZmqAddresses = _UrlList[Annotated[str, AfterValidator(zmq_address)]]
Weights = Annotated[_UrlList[str], _accepted_by(_check_weights)]
PolicyNames = _UrlList[str]
Addresses = _List[str]
"""Addresses, one per instance; an empty one stands for an instance that needs no address."""
EventAddresses = Annotated[_List[str], _accepted_by(_check_event_addresses)]
TenantNames = _List[
    Annotated[str, _matches(NAME, "the name of a tenant: up to 64 of A-Z a-z 0-9 . _ -")]
]
Domains = _HostList[Annotated[str, AfterValidator(_check_domain)]]
HostPatterns = _HostList[Annotated[str, AfterValidator(check_pattern)]]
Origins = _JsonList[
    Annotated[
        str,
        _matches(
            ORIGIN,
            "an origin such as https://chat.example.com, in lower case and without a path, or *",
        ),
    ]
]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Fields of one topic, with their validation."""
