"""Settings of instances, and which of them exclude each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from epd.config import ProxyConfig
from epd.routing.instances import Role

PROXY_FETCH = {"media_fetch": "proxy"}
WRONG_DOMAINS = ["https://a.test", "a.test/x", "a.test:443", "*.a.test", "u@a.test", "a.test,", "["]
E, D = "http://e:1", "http://d:1"


def config(**more: object) -> ProxyConfig:
    return ProxyConfig.model_validate({"encode_servers_urls": E, "decode_servers_urls": D} | more)


@pytest.mark.parametrize("spelling", ["", "disable", "none", "None", " "])
@pytest.mark.parametrize("prefill", ["", "http://p:1"])
def test_config_without_encode_urls_has_no_encode_stage(spelling: str, prefill: str) -> None:
    made = config(encode_servers_urls=spelling, prefill_servers_urls=prefill)

    roles = {Role.PREFILL, Role.DECODE} if prefill else {Role.PREFILL_DECODE}
    assert {instance.role for instance in made.instances} == roles
    assert not made.encodes
    assert config().encodes


def test_encode_urls_are_not_forgotten() -> None:
    with pytest.raises(ValidationError, match="--encode-servers-urls is required"):
        ProxyConfig.model_validate({"decode_servers_urls": D})


def test_url_lists() -> None:
    made = config(
        encode_servers_urls="http://a:1/, https://b/base", prefill_servers_urls="http://p"
    )

    assert made.encode_servers_urls == ("http://a:1", "https://b/base")
    assert {instance.role for instance in made.instances} == {
        Role.ENCODE,
        Role.PREFILL,
        Role.DECODE,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"encode_servers_urls": "none", "ec_store": "file:///ec?max_bytes=1GiB"},
        {"decode_servers_urls": ""},
        {"encode_servers_urls": "e:8001"},
        {"encode_servers_urls": "ftp://e:1"},
        {"encode_servers_urls": "http://e:99999"},
        {"encode_servers_urls": "http://u:p@e"},
        {"encode_servers_urls": "http://e?x"},
        {"encode_servers_urls": f"{E},{E}/"},
        {"prefill_servers_urls": D},
        {"prefill_servers_urls": "http://D:1/"},
        {"decode_servers_urls": "http://d d:1"},
        {"decode_servers_urls": "http://d:1\nx"},
        {"port": -1},
        {"encode_timeout_s": 0},
        {"encode_timeout_s": float("inf")},
        {"decode_media": "both"},
        {"media_fetch": "both"},
        *(PROXY_FETCH | {"allowed_media_domains": wrong} for wrong in WRONG_DOMAINS),
        {"allowed_media_domains": "a.test"},
        {"allow_http_media": True},
        PROXY_FETCH | {"allow_private_media": True},
        PROXY_FETCH | {"media_fetch_trust_env": True},
        {"media_fetch_trust_env": True, "allowed_media_domains": "a.test"},
        {"unknown": 1},
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config(**wrong)


def test_media_domains_are_spelled_as_urls_are_read() -> None:
    domains = "Media.Test., bücher.test,10.0.0.1,[::1],::2"
    made = config(**PROXY_FETCH, allowed_media_domains=domains, allow_private_media=True)

    assert made.allowed_media_domains == (
        *("media.test", "xn--bcher-kva.test", "10.0.0.1", "::1", "::2"),
    )
    assert config(allowed_media_domains="").allowed_media_domains == ()


SERVERS: dict[str, Any] = {"servers_urls": ("http://a:1", "http://b:1"), "ec_store": "redis://h"}


def test_servers_encode_prefill_and_decode_with_their_store() -> None:
    config = ProxyConfig(**SERVERS)

    assert [(one.role, one.url) for one in config.instances] == [
        (Role.PREFILL_DECODE, "http://a:1"),
        (Role.PREFILL_DECODE, "http://b:1"),
    ]
    assert config.policies == ("encode_local",)


def test_servers_beside_encode_instances_are_their_consumers() -> None:
    config = ProxyConfig(**SERVERS, encode_servers_urls=("http://e:1",))

    assert config.policies == ("encode_prefill_decode", "encode_pd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ec_store": None}, "--servers-urls needs --ec-store"),
        ({"decode_servers_urls": ("http://d:1",)}, "--servers-urls names servers that prefill"),
        ({"prefill_servers_urls": ("http://p:1",)}, "--servers-urls names servers that prefill"),
        ({"policies": ("prefill_decode",)}, "--ec-store needs instances that write to it"),
        ({"ec_transfer": "mooncake"}, "--ec-store needs --ec-transfer store"),
    ],
)
def test_servers_that_could_not_serve_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProxyConfig(**{**SERVERS, **changes})


@pytest.mark.parametrize("blank", [" ", ","])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("decode_hosts", {}),
        ("allowed_media_domains", {"media_fetch": "proxy"}),
        ("registration_hosts", {"dynamic_registration": True, "admin_api_key": "k" * 16}),
    ],
)
def test_blank_list_of_hosts_does_not_allow_every_host(
    name: str, more: dict[str, Any], blank: str
) -> None:
    assert getattr(config(**more, **{name: ""}), name) == ()
    with pytest.raises(ValidationError, match=name):
        config(**more, **{name: blank})


def test_blank_list_of_addresses_is_empty() -> None:
    assert config(prefill_servers_urls="http://p", prefill_kv_addrs=" ").prefill_kv_addrs == ()
