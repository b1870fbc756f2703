"""Subscription to the KV events of engines, which keep the known content of prefix caches precise.

vLLM publishes batches of events over ZeroMQ (`--kv-events-config`): frames of a topic, a sequence
number and msgpack. One thread of this process reads those of all engines. It hands only the changed
links to the event loop. After any fault, the content is estimated as without events, until events
name links again.

This module needs the extra `kv-events`.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from epd.aio import Background
from epd.config.sections import ConfigFields
from epd.routing.instances import Instance, Role
from epd.routing.kv_blocks import BlockMap, EventCounts, EventSource, event_sources
from epd.routing.prefix import MAX_LINKS, PrefixCache
from epd.routing.table import InstanceTable
from epd.state_log import StateLog

GPU = frozenset({None, "GPU"})
"""Media of the blocks that count. Blocks that are offloaded to other memory must be loaded back."""

WHOLE = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of attention of which a hit needs all blocks. A model with several kinds reports the
blocks of each, and removes those of a sliding window early."""

MAX_MESSAGE_BYTES = 32 * 1024**2
"""Upper bound of a message. One that stores a prompt of a million tokens has some 8 MB."""

MAX_QUEUED = 10_000
"""Upper bound of the unread messages of an engine. ZeroMQ drops more, which is then a gap."""

MAX_CHANGES = 4 * MAX_LINKS
"""Upper bound of the changed links that wait for the event loop."""

MAX_SOCKETS = 16_384
"""Upper bound of ZeroMQ's sockets. An engine needs three."""

MAX_MESSAGES = 256
"""Messages of one engine that are read before those of the others."""

POLL_MS = 100
PAUSE_S = 0.01
"""Pause of the thread between two rounds, so that it reads several messages in each."""

STOP_S = 1.0
"""Time limit for the end of the thread, in seconds."""

TICK_S = 0.5
"""Interval in which the subscriptions are compared with the instances."""

REPLAY_S = 5.0
"""Upper bound of the time of a replay, in seconds. The events of the other engines wait for it."""

NO_REPLAY_S = 60.0
"""Time for which an engine is not asked again after a replay that did not end, in seconds."""

MAX_REPLAYED = 1_000
"""Upper bound of the unread messages of a replay. The engine waits before it sends more."""

HEARTBEAT_MS, SILENT_MS = 5_000, 15_000
"""Interval of ZeroMQ's heartbeats, and the time after which a silent connection is closed."""

EMPTIED = frozenset({"cleared", "restarted"})
"""Reasons after which an engine has none of its earlier blocks."""

END = b"\xff" * 8
"""Sequence number of the last message of a replay."""

HASH = 2**64 - 1

BlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has stored blocks that follow each other."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    block_size: Annotated[int, msgspec.Meta(gt=0, le=2**20)]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has removed blocks."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has removed all blocks."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Message of an engine. Later fields are ignored."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_DECODER = msgspec.msgpack.Decoder(EventBatch)

Replay = Callable[[int], Iterable[tuple[int, bytes]]]
"""Returns the batches from a sequence number on that the engine still has."""


class FeedReport(NamedTuple):
    """News of one engine for the event loop.

    Attributes:
        fault: reason why earlier reports no longer hold; empty for none.
        changes: links since then, as of `BlockMap.take_changes`.
        counts: number of events and of faults since the last report.
    """

    fault: str
    changes: Mapping[int, int | None]
    counts: Mapping[str, int]


class ReplayEndless(Exception):
    """An engine did not end its replay in time."""


class EventFeed:
    """Events of one engine, in their order. Belongs to one thread."""

    def __init__(self, replay: Replay = lambda _: ()) -> None:
        self._replay = replay
        self._blocks = BlockMap()
        self._last = -1
        self._next: int | None = None
        self._group: int | None = None
        self._fault = ""
        self._counts: Counter[str] = Counter()

    def receive(self, frames: Sequence[bytes]) -> None:
        """Handle a message. A malformed one is a fault."""
        if len(frames) != 3 or len(frames[1]) != len(END):  # noqa: PLR2004 - topic, number, batch
            self.record_fault("malformed")
            return
        number = int.from_bytes(frames[1], "big")
        if number <= self._last:
            self.record_fault("restarted")
        if number != self._next:
            self._catch_up(self._next, number)
        self._last, self._next = number, number + 1
        self._apply_batch(frames[2])
        if self._blocks.change_count > MAX_CHANGES:  # the event loop takes no reports
            self.record_fault("gap")

    def record_fault(self, fault: str) -> None:
        """Forget the blocks: events are missing."""
        self._counts[fault] += 1
        if self._fault not in EMPTIED:
            self._fault = fault
        self._next = None
        self._blocks.clear_blocks()

    def take_report(self) -> FeedReport | None:
        """Return the news since the last report; None if there are none."""
        changes = self._blocks.take_changes()
        if not (changes or self._counts):
            return None
        report = FeedReport(self._fault, changes, self._counts)
        self._fault, self._counts = "", Counter()
        return report

    def _catch_up(self, first: int | None, until: int) -> None:
        """Read the missing batches again, as far as the engine still has them.

        Without a first one there is nothing to lose: the subscription is new, or broken already.
        """
        expected = first or 0
        try:
            for number, batch in self._replay(expected) if until else ():
                if number >= until:
                    break
                if number != expected and first is not None:
                    self.record_fault("gap")
                    first = None
                self._apply_batch(batch)
                expected = number + 1
        except ReplayEndless:
            self.record_fault("replay")
            return
        if expected != until and first is not None:
            self.record_fault("gap")

    def _apply_batch(self, batch: bytes) -> None:
        try:
            events = _DECODER.decode(batch).events
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self.record_fault("malformed")
            return
        for event in events:
            match event:
                case BlockStored() if self._is_followed(event):
                    self._counts["stored"] += 1
                    parent = event.parent_block_hash
                    self._blocks.record_stored(
                        [*map(_number, event.block_hashes)],
                        None if parent is None else _number(parent),
                        event.block_size,
                        event.session_id,
                    )
                case BlockRemoved() if event.medium in GPU and event.group_idx == self._group:
                    self._counts["removed"] += 1
                    self._blocks.record_removed(map(_number, event.block_hashes))
                case AllBlocksCleared():
                    self._counts["cleared"] += 1
                    self._blocks.clear_blocks()
                    self._fault = "cleared"

    def _is_followed(self, event: BlockStored) -> bool:
        """Return whether blocks count: those of the first group that has all blocks of a prompt."""
        if event.medium not in GPU or event.kv_cache_spec_kind not in WHOLE:
            return False
        if self._group is None:
            self._group = event.group_idx
        return event.group_idx == self._group


def _number(block: BlockHash) -> int:
    """Return the last 64 bits of a hash, as with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`."""
    return block & HASH if isinstance(block, int) else int.from_bytes(block[-8:], "big")


FeedKey = tuple[tuple[Role, str], int]
"""Key of an instance, and the number of its data-parallel rank."""

Deliver = Callable[[Sequence[tuple["Subscription", FeedReport]]], object]


class Subscription:
    """Connection to one engine. Belongs to the thread.

    `pending` is True while a report is on its way to the event loop, which sets it to False.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        key: FeedKey,
        source: EventSource,
        stopped: threading.Event,
    ) -> None:
        self.key = key
        self.source = source
        self.pending = False
        self.feed = EventFeed(self._replay)
        self._context = context
        self._stopped = stopped
        self._replay_from_s = 0.0
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
            self.socket.connect(source.endpoint)
        except zmq.ZMQError:  # no address for ZeroMQ; the other engines are followed
            self.feed.record_fault("disconnected")

    def read_messages(self) -> None:
        """Read what has arrived, at most `MAX_MESSAGES`."""
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            self.feed.record_fault("disconnected")
        for _ in range(MAX_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.feed.receive(frames)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Ask the engine for its batches from a number on; it answers to a `ROUTER` socket.

        Raises:
            ReplayEndless: it did not end in time, now or just before, or the thread is stopped.
        """
        if not self.source.replay:
            return
        now_s = time.monotonic()
        if now_s < self._replay_from_s:
            raise ReplayEndless
        until_s = now_s + REPLAY_S
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.IPV6, 1)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, MAX_REPLAYED)
            socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            try:
                socket.connect(self.source.replay)
            except zmq.ZMQError:  # no address for ZeroMQ
                return
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while time.monotonic() < until_s and not self._stopped.is_set():
                if not socket.poll(POLL_MS):
                    continue
                match socket.recv_multipart():
                    case [b"", _, number, batch] if number != END:
                        yield int.from_bytes(number, "big"), batch
                    case _:
                        return
        self._replay_from_s = time.monotonic() + NO_REPLAY_S
        raise ReplayEndless

    def close_sockets(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class EventReader(threading.Thread):
    """Thread that reads the events of all engines.

    It calls `deliver` with reports. `Subscription.pending` must be set to False after each.
    """

    def __init__(self, deliver: Deliver) -> None:
        super().__init__(name="kv-events", daemon=True)
        self._deliver = deliver
        self._wanted: Mapping[FeedKey, EventSource] = {}
        self._stopped = threading.Event()

    def follow_engines(self, wanted: Mapping[FeedKey, EventSource]) -> None:
        """Subscribe to these engines only."""
        self._wanted = wanted

    def stop_reading(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        subscribed: dict[FeedKey, Subscription] = {}
        poller = zmq.Poller()
        try:
            while not self._stopped.is_set():
                reports = self._subscribe(context, poller, subscribed)
                ready = dict(poller.poll(POLL_MS))
                for subscription in subscribed.values():
                    if subscription.socket in ready or subscription.monitor in ready:
                        subscription.read_messages()
                    if (
                        not subscription.pending
                        and (report := subscription.feed.take_report()) is not None
                    ):
                        subscription.pending = True
                        reports.append((subscription, report))
                if reports:
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
    ) -> list[tuple[Subscription, FeedReport]]:
        """Change the subscriptions to the wanted ones. Return a report for each that ends."""
        wanted, ended = self._wanted, []
        for key, subscription in list(subscribed.items()):
            if wanted.get(key) != subscription.source:
                del subscribed[key]
                poller.unregister(subscription.socket)
                poller.unregister(subscription.monitor)
                subscription.close_sockets()
                ended.append((subscription, FeedReport("unsubscribed", {}, {})))
        for key in wanted.keys() - subscribed.keys():
            subscribed[key] = subscription = Subscription(context, key, wanted[key], self._stopped)
            poller.register(subscription.socket, zmq.POLLIN)
            poller.register(subscription.monitor, zmq.POLLIN)
        return ended


class KVEvents:
    """The known content of prefix caches, kept up to date by the events of their engines."""

    def __init__(self, table: InstanceTable, config: ConfigFields) -> None:
        self._table = table
        self._config = config
        self._logs: dict[FeedKey, StateLog] = {}
        self._instances: dict[tuple[Role, str], Instance] = {}
        self._counts: dict[tuple[Role, str], Counter[str]] = {}

    @asynccontextmanager
    async def run_events(self, background: Background) -> AsyncIterator[EventCounts]:
        """Follow the events in the background until the context exits. Yield their counts."""
        async with background.run_task("kv_events", self._run):
            yield lambda: self._counts

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = EventReader(
            lambda reports: loop.call_soon_threadsafe(self._record_reports, reports)
        )
        reader.start()
        try:
            while reader.is_alive():
                reader.follow_engines(self._wanted())
                await asyncio.sleep(TICK_S)
            raise RuntimeError("the thread that reads KV events has ended")
        finally:
            reader.stop_reading()
            self._forsake(self._instances.values())
            # Bounded: the interpreter waits for the thread of this call when it exits.
            await asyncio.to_thread(reader.join, STOP_S)

    def _wanted(self) -> dict[FeedKey, EventSource]:
        config = self._config
        instances = {
            instance.key: instance for instance in self._table.of_roles(*config.content_roles)
        }
        self._forsake(instance for key, instance in self._instances.items() if key not in instances)
        self._instances = instances
        self._counts = {key: self._counts.get(key, Counter()) for key in instances}
        wanted = {
            (key, rank): source
            for key, instance in instances.items()
            for rank, source in enumerate(event_sources(instance, config.kv_events_addrs))
        }
        self._logs = {key: log for key, log in self._logs.items() if key in wanted}
        return wanted

    def _forsake(self, instances: Iterable[Instance]) -> None:
        """Estimate the caches of instances that are not followed any more."""
        for instance in instances:
            with suppress(KeyError):  # it has been removed
                for cache in self._table.load(instance).caches:
                    cache.estimate_reported()

    def _cache(self, key: FeedKey) -> PrefixCache | None:
        """Return the cache of an engine; None if its instance has been removed."""
        instance, rank = self._instances.get(key[0]), key[1]
        try:
            return None if instance is None else self._table.load(instance).cache_of(rank)
        except KeyError:
            return None

    def _record_reports(self, reports: Sequence[tuple[Subscription, FeedReport]]) -> None:
        """Record the news of engines. Runs on the event loop."""
        for subscription, report in reports:
            subscription.pending = False
            if (cache := self._cache(subscription.key)) is not None:
                self._record_report(subscription.key, cache, report)

    def _record_report(self, key: FeedKey, cache: PrefixCache, report: FeedReport) -> None:
        self._counts[key[0]].update(report.counts)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = StateLog(
                "the KV events of an engine cannot be followed",
                "its prefix cache is estimated",
                instance=key[0][1],
                rank=str(key[1]),
            )
        if report.fault in EMPTIED:
            cache.clear()
        elif report.fault:
            cache.estimate_reported()
            log.record_failure(report.fault)
        cache.apply_changes(report.changes)
        if cache.precise:
            log.record_success()
