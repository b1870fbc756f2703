"""Addresses of KV connectors: the proxy asks for them at start and at registration, never later."""

from pathlib import Path
from typing import Any

import pytest

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.load import load
from epd.discovery.entries import read_json, write_json
from epd.routing.instances import Instance, Role
from tests.support.fleet import Launch
from tests.support.programs import run

ADMIN = "0123456789abcdef"
URLS = {
    "encode_servers_urls": "http://e:1",
    "prefill_servers_urls": "http://p1:1,http://p2:1",
    "decode_servers_urls": "http://d:1",
}


def wrong(**settings: str) -> str:
    with pytest.raises(ConfigInvalid) as invalid:
        load({**URLS, **settings})
    return "\n".join(invalid.value.reasons)


def configured(**settings: str) -> ProxyConfig:
    return load({**URLS, **settings}).config


def test_addresses_go_with_urls_in_their_order() -> None:
    config = configured(kv_transfer="mooncake", prefill_kv_addrs=" ,p2:9")

    assert [one.kv_addr for one in config.instances] == ["", "", "p2:9", ""]


def test_several_instances_may_have_none() -> None:
    urls = {"decode_servers_urls": "http://d:1,http://d:2,http://d:3"}
    config = configured(kv_transfer="lmcache", decode_kv_addrs=",,d3:1:2", **urls)

    assert [one.kv_addr for one in config.instances][-3:] == ["", "", "d3:1:2"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill_kv_addrs": "p1:9"}, "--prefill-kv-addrs needs one address per URL of"),
        ({"decode_kv_addrs": "d:1:2,d:1:2"}, "it has 2 for 1"),
        (
            {
                "kv_transfer": "lmcache",
                "decode_servers_urls": "http://d:1,http://d:2",
                "decode_kv_addrs": "d:1:2,d:1:2",
            },
            "'d:1:2' is named twice",
        ),
        (
            {
                "prefill_servers_urls": "disable",
                "ec_consumer_dp_size": "2",
                "ec_consumer_zmq_addrs": "tcp://d:5,tcp://d:5",
            },
            "'tcp://d:5' is named twice",
        ),
        ({"kv_transfer": "mooncake", "prefill_kv_addrs": "p1:9,p2 9"}, "http://p2:1"),
        (
            {"kv_transfer": "lmcache", "decode_kv_addrs": "nonsense"},
            "http://d:1: --decode-kv-addrs: 'nonsense' is not an address such as host:port:port",
        ),
        (
            {"kv_transfer": "nixl", "prefill_kv_addrs": "p1:9,p2:9"},
            "http://p1:1: --prefill-kv-addrs: nixl does not use",
        ),
        ({"kv_transfer": "nothing"}, "kv-transfer"),
    ],
)
def test_addresses_that_do_not_fit_the_transfer_are_rejected_at_the_start(
    settings: dict[str, str], said: str
) -> None:
    assert said in wrong(**settings)


@pytest.mark.parametrize(
    ("kv_addr", "status"), [("10.0.0.1:9000", 200), ("", 200), ("h x", 422), ("@", 422), (1, 422)]
)
async def test_an_address_is_checked_at_registration_and_shown(
    launch: Launch, kv_addr: Any, status: int
) -> None:
    config: Any = {"kv_transfer": "mooncake", "admin_api_key": ADMIN, "dynamic_registration": True}
    key = {"X-API-Key": ADMIN}
    async with launch(prefill=1, **config) as fleet:
        url = f"{fleet.url}/instances"
        body = {"role": "prefill", "url": "http://p:1", "kv_addr": kv_addr}
        async with fleet.http.post(url, json=body, headers=key) as reply:
            assert reply.status == status, await reply.text()
        async with fleet.http.get(url, headers=key) as reply:
            rows = {row["url"]: row["kv_addr"] for row in (await reply.json())["instances"]}

        assert rows == {one.url: "" for one in fleet.instances} | (
            {"http://p:1": kv_addr} if status == 200 else {}
        )


async def test_an_instance_that_the_transfer_cannot_use_takes_no_part(
    launch: Launch, tmp_path: Path
) -> None:
    """Another proxy with another transfer may have registered it in a shared store."""
    path = tmp_path / "instances.yaml"
    path.write_text(
        "instances:\n"
        "  - {role: prefill, url: 'http://p:1', kv_addr: 'h:1'}\n"
        "  - {role: encode, url: 'http://e:1'}\n"
    )
    async with launch(prefill=1, instances_file=path) as fleet:
        async with fleet.http.get(f"{fleet.url}/instances") as reply:
            page = await reply.json()

        assert page["prefill"]["live"] == [fleet.p.url]
        assert "http://e:1" in page["encode"]["live"]
        assert [(one.instance, one.state) for one in fleet.events.changes] == [
            ("http://p:1", "refused"),
            ("http://e:1", "added"),
        ]


def test_a_proxy_does_not_start_with_a_file_of_such_an_instance(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text("instances: [{role: prefill, url: 'http://p:1', kv_addr: 'h:1'}]")
    ended = run("serve", "--instances-file", str(path), "--port", "0")

    assert ended.returncode != 0
    assert "http://p:1: nixl does not use a kv_addr" in ended.stderr


def test_an_address_survives_being_written_down() -> None:
    one = Instance(Role.PREFILL, "http://p:1", kv_addr="h:1")

    assert read_json(write_json((one,))) == (one,)
