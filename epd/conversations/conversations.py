"""Which turn belongs to which conversation, and what of it may still be relied on."""

import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal, Self, TypeVar

import structlog

from ec_store import redacted
from ec_store.breaker import Breaker
from epd.config.live import LiveConfig
from epd.conversations.entry import MAX_BYTES, Entry, Held
from epd.conversations.fingerprint import Fingerprint
from epd.conversations.memory import InMemory
from epd.conversations.stores import Store, StoreAway
from epd.conversations.turn import Turn
from epd.deadline import within
from epd.tenants import ANONYMOUS
from epd.transfer.readback import engine_of, kept_params

T = TypeVar("T")

Result = Literal["hit", "miss", "stale", "changed", "failed", "rested", "unknown"]
"""What became of what the last turn has left: prefill read it; there was nothing, or only who
answered; it is too old, or decode was gone or another since; the prompt does not begin with it, or
nobody can tell; prefill could not read it; it was told nothing, as it could not a while ago; the
store gave no answer."""

RESULTS: tuple[Result, ...] = ("hit", "miss", "stale", "changed", "failed", "rested", "unknown")

logger = structlog.get_logger("epd")


class Conversations:
    """What turns leave for the next. A fault of it costs a turn its prefix, and never fails it.

    Belongs to one event loop.

    Attributes:
        results: how often what came of an entry.
    """

    def __init__(
        self, store: Store, live: LiveConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self.results: Counter[Result] = Counter()
        self._store = store
        config = live.current
        self._live = live
        self._clock = clock
        self._key = hashlib.blake2b(config.name_scope_of(ANONYMOUS).secret).digest()
        name = f"the conversation store {redacted(config.conversation_store or 'memory')}"
        self._breaker = Breaker(name, warn=_warn)
        self._engines: dict[str, str] = {}
        self._lost_s: dict[str, float] = {}
        self._warned = config.workers == 1 or config.conversation_store is not None

    @classmethod
    def of(cls, live: LiveConfig) -> Self:
        """Those of the configured store: a context, which closes it."""
        if (url := live.current.conversation_store) is None:
            return cls(InMemory(lambda: live.current.max_conversations), live)
        from epd.conversations.redis_store import InRedis  # noqa: PLC0415 - takes its time to load

        return cls(InRedis(url), live)

    async def __aenter__(self) -> Self:
        """They."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the store."""
        await self._store.close()

    @property
    def kept(self) -> int | None:
        """How many there are; None: nobody has counted."""
        return self._store.kept

    @property
    def evicted(self) -> int:
        """How many were dropped that no turn has found (`Store`)."""
        return self._store.evicted

    async def begin(self, turn: Turn, decodes: Collection[str]) -> None:
        """Have a turn go on with what the last one of its conversation has left: it alone, once.

        Args:
            turn: it.
            decodes: URLs of the instances that may still hold its blocks.
        """
        if turn.begun:
            return
        turn.begun = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "each worker keeps conversations of its own",
                next="set --conversation-store redis://…, or a turn finds the last one by chance",
            )
        answered, before = await self._ask(lambda: self._store.take(turn.key))
        if before is None:
            self.results["miss" if answered else "unknown"] += 1
        elif before.decode not in decodes or self._is_void(before):
            self.results["stale"] += 1
        else:
            turn.follow(before)
            if before.held is None:
                self.results["miss"] += 1

    async def keep(self, turn: Turn) -> None:
        """Keep what a turn leaves, whose answer has ended well."""
        if turn.decode is None:
            return
        held = self._held(turn, turn.decode)
        if held is not None:
            self._know(turn.decode, held.engine)
        entry = Entry(self._clock(), turn.decode, turn.prefill, held)
        if held is not None and len(entry.written()) > MAX_BYTES:
            entry = replace(entry, held=None)
        await self._ask(
            lambda: self._store.put(turn.key, entry, self._live.current.conversation_ttl)
        )

    def common(self, held: Held, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens are those of what decode holds.

        Raises:
            ValueError: they are no tokens.
        """
        return held.tokens.common(prompt, self._key)

    def lost(self, decode: str) -> None:
        """A decode instance has gone, or another has come in its place: its blocks are no more."""
        now_s = self._clock()
        over = [
            url
            for url, at in self._lost_s.items()
            if at < now_s - self._live.current.conversation_ttl
        ]
        for url in over:
            del self._lost_s[url]
        self._lost_s[decode] = now_s
        self._engines.pop(decode, None)
        self._store.forget(decode)

    def _held(self, turn: Turn, decode: str) -> Held | None:
        """What decode holds of a turn; None where it has not said it, or nobody could use it."""
        heard = turn.heard
        if turn.basis is None or heard is None or heard.params is None or not heard.prompt:
            return None
        params = kept_params(heard.params, decode)
        if params is None:
            return None
        try:
            tokens = [*heard.prompt, *heard.answer][: params["remote_num_tokens"]]
            fingerprint = Fingerprint.of(tokens, self._key)
        except ValueError:
            return None
        basis, engine = turn.basis, engine_of(params)
        return Held({**params}, fingerprint, basis.media, basis.form, engine)

    def _know(self, decode: str, engine: str) -> None:
        """An instance's engine, which is another after each start."""
        if self._engines.get(decode, engine) != engine:
            self.lost(decode)
        self._engines[decode] = engine

    def _is_void(self, entry: Entry) -> bool:
        """Whether its time is over, or the instance that answered is not the same any more.

        A store keeps it as long as it was told to then, and Redis from when it got round to it.
        """
        if entry.kept_s < self._clock() - self._live.current.conversation_ttl:
            return True
        if entry.kept_s < self._lost_s.get(entry.decode, 0.0):
            return True
        known = self._engines.get(entry.decode)
        return entry.held is not None and known not in {None, entry.held.engine}

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> tuple[bool, T | None]:
        """Whether the store has answered, and what."""
        if self._breaker.open:
            return False, None
        try:
            with within(self._live.current.conversation_budget_s):
                answer = await call()
        except (StoreAway, TimeoutError) as error:
            self._breaker.failed(str(error) or "no answer in time")
            return False, None
        self._breaker.succeeded()
        return True, answer


def _warn(text: str) -> None:
    """Log it, by what is configured then."""
    logger.warning(text)
