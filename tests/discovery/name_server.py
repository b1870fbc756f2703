"""DNS server on a loopback port with answers that a test sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


@dataclass
class NameServer(asyncio.DatagramProtocol):
    """DNS server over UDP.

    Attributes:
        addresses: addresses by name; the answer for any other name is NXDOMAIN.
        failing: whether it answers SERVFAIL.
        silent: whether it does not answer.
        asked: number of queries received.
    """

    addresses: dict[str, list[str]] = field(default_factory=dict)
    failing: bool = False
    silent: bool = False
    asked: int = 0
    address: str = ""
    _transport: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["NameServer"]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.address = "127.0.0.1:{}".format(transport.get_extra_info("sockname")[1])
        try:
            yield self
        finally:
            transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        self.asked += 1
        if not self.silent:
            self._transport.sendto(self._answer(dns.message.from_wire(data)).to_wire(), addr)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        [question] = query.question
        name = question.name.to_text(omit_final_dot=True)
        if self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.addresses:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        else:
            kind = dns.rdatatype.to_text(question.rdtype)
            found = [one for one in self.addresses[name] if (":" in one) == (kind == "AAAA")]
            if found:
                answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
        return answer
