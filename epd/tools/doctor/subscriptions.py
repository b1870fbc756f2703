"""Trial subscriptions of `epd doctor` to the KV events of instances.

This module needs the extra `kv-events`.
"""

import asyncio
from collections.abc import Sequence

import zmq

from epd.routing.instances import Instance
from epd.routing.kv_sources import EventSource, event_sources
from epd.tools.doctor.facts import Trial


async def try_subscription(instance: Instance, addresses: Sequence[str], timeout_s: float) -> Trial:
    """Return whether each engine of an instance accepts a subscriber to its events.

    Args:
        instance: the instance.
        addresses: addresses of KV events, as configured.
        timeout_s: deadline of each connection.
    """
    sources = [*event_sources(instance, addresses)]
    return await asyncio.to_thread(_subscribe, sources, timeout_s)


def _subscribe(sources: Sequence[EventSource], timeout_s: float) -> Trial:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for endpoint, _ in sources:
            socket = context.socket(zmq.SUB)
            socket.set(zmq.IPV6, 1)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(endpoint)
            if not monitor.poll(int(1000 * timeout_s)):
                return Trial(f"{endpoint} accepts no subscriber")
    finally:
        context.destroy(0)
    return Trial()
