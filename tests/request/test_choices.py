"""Decode instance that a header or a picker names."""

from typing import Any

import pytest

import epd
from epd.policies.plan import Course, DecodeFrom
from epd.request.choices import Choices
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.routing.instances import Instance, Role
from epd.routing.recent_items import RecentItems
from epd.routing.table import InstanceTable

PLAIN, TLS = (Instance(Role.DECODE, url) for url in ("http://d:1", "https://d:2"))


class Picker:
    def __init__(self, named: str) -> None:
        self.named = named

    async def ask_picker(self, *_: Any) -> str:
        return self.named


@pytest.mark.parametrize("decode_from", ["header", "picker"])
@pytest.mark.parametrize(
    ("named", "instance"),
    [("d:1", PLAIN), ("d:2", TLS), ("http://d:1", PLAIN), ("https://d:2", TLS)],
)
async def test_host_and_port_are_enough_for_instances_with_and_without_tls(
    decode_from: DecodeFrom, named: str, instance: Instance
) -> None:
    config = epd.ProxyConfig(
        encode_servers_urls=(), decode_servers_urls=("http://d:1", "https://d:2")
    )
    picker: Any = Picker(named)
    choices = Choices(InstanceTable([PLAIN, TLS]), picker, RecentItems())
    course = Course(encode=False, prefill=False, decode_from=decode_from, decode_choice="late")
    request = Request("r", {}, config, client_headers={config.decode_header: named})

    assert await choices.choose_decode(request, Attempt(course)) == instance
