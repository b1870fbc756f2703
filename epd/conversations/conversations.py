"""The entries of conversations: their lookup, validity and storage, and the results of lookups."""

import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal, Self, TypeVar, get_args

import structlog

from ec_store.concurrency import Breaker
from ec_store.config import redacted
from epd.aio import cancel_after
from epd.config.sections import ConfigFields
from epd.config.sections.transfers import TransferSettings
from epd.conversations.entry import (
    MAX_ENTRY_BYTES,
    ConversationEntry,
    Fingerprint,
    StoredBlocks,
    parse_entry,
)
from epd.conversations.stores import (
    ConversationsInMemory,
    ConversationsInRedis,
    ConversationStore,
    StoreAway,
)
from epd.conversations.turn import AnsweredTurn, Turn
from epd.tenants import ANONYMOUS
from epd.transfer.nixl import BLOCKS_TTL_S, kept_params

logger = structlog.get_logger("epd")

T = TypeVar("T")

Result = Literal["hit", "miss", "stale", "changed", "failed", "rested", "unknown"]
"""The fate of the previous turn's entry. `hit`: prefill read its blocks. `miss`: there was no
entry, or one without blocks. `stale`: it expired, or decode was gone or restarted. `changed`: the
prompt does not begin with its tokens, or that is unknown. `failed`: prefill could not read the
blocks. `rested`: prefill was not asked, because of an earlier failure. `unknown`: the store did not
answer."""

RESULTS: tuple[Result, ...] = get_args(Result)


def warn_of(config: TransferSettings) -> None:
    """Warn if conversations live longer than decode's blocks by default."""
    ttl_s = config.conversation_ttl
    if ttl_s < BLOCKS_TTL_S:
        return
    logger.warning(
        "conversations are kept for longer than decode instances keep their blocks by default",
        conversation_ttl=ttl_s,
        next=f"choose less than {BLOCKS_TTL_S:g}, or give decode a decoder_kv_blocks_ttl above "
        "it by more than 5",
    )


class Conversations:
    """Entries that turns leave for the next ones.

    A failure costs a turn its prefix, but never fails it. Belongs to one event loop.

    Attributes:
        results: number of entries by result.
        store: their store.
        token_key: key of the fingerprints of their tokens.
    """

    def __init__(
        self,
        store: ConversationStore,
        config: ConfigFields,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.results: Counter[Result] = Counter()
        self.store = store
        self._config = config
        self._clock = clock
        self.token_key = hashlib.blake2b(config.name_scope_of(ANONYMOUS).secret).digest()
        name = f"the conversation store {redacted(config.conversation_store or 'memory')}"
        self._breaker = Breaker(name, warn=_warn)
        self._engines: dict[str, str] = {}
        self._lost_s: dict[str, float] = {}
        self._warned = config.workers == 1 or config.conversation_store is not None

    @classmethod
    @asynccontextmanager
    async def open(cls, config: ConfigFields) -> AsyncIterator[Self]:
        """Return the conversations of the configured store, which is closed at the exit."""
        url = config.conversation_store
        store = ConversationsInRedis(url) if url else ConversationsInMemory()
        try:
            yield cls(store, config)
        finally:
            await store.close()

    async def begin_turn(self, turn: Turn, decodes: Collection[str]) -> None:
        """Look up and take the entry of the previous turn. No other turn can use it.

        `decodes` are the URLs of the instances that may still hold its blocks.
        """
        if turn.begun:
            return
        turn.begun = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "each worker keeps conversations of its own",
                next="set --conversation-store redis://…; else a turn may miss the previous one",
            )
        answered, written = await self._ask(lambda: self.store.take_entry(turn.key))
        if written is None or (before := parse_entry(written)) is None:
            self.results["miss" if answered else "unknown"] += 1
        elif before.decode not in decodes or self._is_stale(before):
            self.results["stale"] += 1
        else:
            turn.before = before
            if before.blocks is None:
                self.results["miss"] += 1

    async def store_turn(self, turn: AnsweredTurn) -> None:
        """Store the entry of a turn after its answer ended without an error."""
        blocks = self._blocks_of(turn)
        if blocks is not None:
            self._know(turn.decode, blocks.engine)
        entry = ConversationEntry(self._clock(), turn.decode, turn.prefill, blocks)
        written = entry.to_json()
        if len(written) > MAX_ENTRY_BYTES:
            written = replace(entry, blocks=None).to_json()
        ttl_s = self._config.conversation_ttl
        await self._ask(lambda: self.store.put(turn.key, written, ttl_s))

    def drop_instance(self, decode: str) -> None:
        """Note that a decode instance was removed or restarted: its blocks are lost."""
        now_s = self._clock()
        oldest_s = now_s - self._config.conversation_ttl
        self._lost_s = {url: at for url, at in self._lost_s.items() if at >= oldest_s}
        self._lost_s[decode] = now_s
        self._engines.pop(decode, None)

    def _blocks_of(self, turn: AnsweredTurn) -> StoredBlocks | None:
        """Return the blocks that decode holds of a turn; None if unknown or unusable."""
        basis, reply = turn.basis, turn.capture
        if basis is None or reply is None or reply.params is None or not reply.prompt:
            return None
        if (params := kept_params(reply.params, turn.decode)) is None:
            return None
        try:
            tokens = [*reply.prompt, *reply.answer][: params["remote_num_tokens"]]
            fingerprint = Fingerprint.of_tokens(tokens, self.token_key)
        except ValueError:
            return None
        return StoredBlocks({**params}, fingerprint, basis)

    def _know(self, decode: str, engine: str) -> None:
        """Record the engine of an instance. It differs after each start."""
        if self._engines.get(decode, engine) != engine:
            self.drop_instance(decode)
        self._engines[decode] = engine

    def _is_stale(self, entry: ConversationEntry) -> bool:
        """Return whether an entry has expired, or its decode instance was lost.

        The store's own expiry is not enough: it uses the time to live at the time of writing, and
        Redis counts from the arrival of the write.
        """
        if entry.stored_s < self._clock() - self._config.conversation_ttl:
            return True
        if entry.stored_s < self._lost_s.get(entry.decode, 0.0):
            return True
        known = self._engines.get(entry.decode)
        return entry.blocks is not None and known not in {None, entry.blocks.engine}

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> tuple[bool, T | None]:
        """Return whether the store answered, and its answer."""
        if self._breaker.open:
            return False, None
        try:
            with cancel_after(self._config.conversation_budget_s):
                answer = await call()
        except (StoreAway, TimeoutError) as error:
            self._breaker.record_failure(str(error) or "no answer in time")
            return False, None
        self._breaker.succeeded()
        return True, answer


def _warn(text: str) -> None:
    """Log a message with the logger that is configured at that time."""
    logger.warning(text)
