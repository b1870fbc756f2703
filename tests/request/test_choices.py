"""Decode instance that a header names."""

import pytest

import epd
from epd.request.choices import Choices
from epd.request.request import Request
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable

PLAIN, TLS = (Instance(Role.DECODE, url) for url in ("http://d:1", "https://d:2"))


@pytest.mark.parametrize(
    ("named", "instance"),
    [("d:1", PLAIN), ("d:2", TLS), ("http://d:1", PLAIN), ("https://d:2", TLS)],
)
def test_host_and_port_are_enough_for_instances_with_and_without_tls(
    named: str, instance: Instance
) -> None:
    config = epd.ProxyConfig(
        encode_servers_urls=(),
        decode_servers_urls=("http://d:1", "https://d:2"),
        decode_from="header",
    )
    choices = Choices(InstanceTable([PLAIN, TLS]))
    request = Request("r", {}, config, client_headers={config.decode_header: named})

    assert choices.client_decode(request) == instance
