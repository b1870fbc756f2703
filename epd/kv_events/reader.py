"""Thread that reads the KV events of all engines over ZeroMQ (`--kv-events-config` of vLLM).

It hands only the changed links to the event loop.

This module needs the extra `kv-events`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from epd.kv_events.feed import EventFeed, FeedReport
from epd.routing.instances import Role

MAX_MESSAGE_BYTES = 32 * 1024**2
"""Upper bound of a message. One that stores a prompt of a million tokens has some 8 MB."""

MAX_QUEUED = 10_000
"""Upper bound of the unread messages of an engine. ZeroMQ drops more, which is then a gap."""

MAX_SOCKETS = 16_384
"""Upper bound of ZeroMQ's sockets. An engine needs three."""

MAX_MESSAGES = 256
"""Messages of one engine that are read before those of the others."""

POLL_MS = 100
PAUSE_S = 0.01
"""Pause of the thread between two rounds, so that it reads several messages in each."""

HEARTBEAT_MS, SILENT_MS = 5_000, 15_000
"""Interval of ZeroMQ's heartbeats, and the time after which a silent connection is closed."""

FeedKey = tuple[tuple[Role, str], int]
"""Key of an instance, and the number of its data-parallel rank."""

Reports = Sequence[tuple[FeedKey, FeedReport]]


class Subscription:
    """Connection to one engine. Belongs to the thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.feed = EventFeed()
        self.socket = context.socket(zmq.SUB)
        self.socket.set(zmq.IPV6, 1)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, MAX_QUEUED)
        self.socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
        self.socket.subscribe(b"")
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:  # no address for ZeroMQ; the other engines are followed
            self.feed.record_fault("disconnected")

    def read_messages(self) -> None:
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            self.feed.record_fault("disconnected")
        for _ in range(MAX_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.feed.receive(frames)

    def close_sockets(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class EventReader(threading.Thread):
    """Thread that reads the events of all engines, and calls `deliver` with reports.

    Attributes:
        endpoints: the engines to follow; another thread may replace the mapping.
        taken: clear while reports are on their way; to be set by the receiver.
        stopped: ends the thread.
    """

    def __init__(self, deliver: Callable[[Reports], object]) -> None:
        super().__init__(name="kv-events", daemon=True)
        self._deliver = deliver
        self.endpoints: Mapping[FeedKey, str] = {}
        self.taken = threading.Event()
        self.taken.set()
        self.stopped = threading.Event()

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        subscribed: dict[FeedKey, Subscription] = {}
        ended: list[FeedKey] = []
        poller = zmq.Poller()
        try:
            while not self.stopped.is_set():
                ended += self._subscribe(context, poller, subscribed)
                ready = dict(poller.poll(POLL_MS))
                for subscription in subscribed.values():
                    if subscription.socket in ready or subscription.monitor in ready:
                        subscription.read_messages()
                if self.taken.is_set():
                    reports = [(key, FeedReport("unsubscribed", {}, {})) for key in ended]
                    ended = []
                    for key, subscription in subscribed.items():
                        if (report := subscription.feed.take_report()) is not None:
                            reports.append((key, report))
                    if reports:
                        self.taken.clear()
                        self._deliver(reports)
                time.sleep(PAUSE_S)
        finally:
            for subscription in subscribed.values():
                subscription.close_sockets()
            context.destroy(0)

    def _subscribe(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        subscribed: dict[FeedKey, Subscription],
    ) -> list[FeedKey]:
        """Change the subscriptions to the current ones. Return the keys of those that ended."""
        endpoints, ended = self.endpoints, []
        for key, subscription in list(subscribed.items()):
            if endpoints.get(key) != subscription.endpoint:
                del subscribed[key]
                poller.unregister(subscription.socket)
                poller.unregister(subscription.monitor)
                subscription.close_sockets()
                ended.append(key)
        for key in endpoints.keys() - subscribed.keys():
            subscribed[key] = subscription = Subscription(context, endpoints[key])
            poller.register(subscription.socket, zmq.POLLIN)
            poller.register(subscription.monitor, zmq.POLLIN)
        return ended
