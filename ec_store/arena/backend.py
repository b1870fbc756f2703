"""Backend of `shm://`, the memory of a host."""

from typing import TYPE_CHECKING

from ec_store.arena.url import arena_options
from ec_store.backends import Backend

if TYPE_CHECKING:
    from ec_store.arena.store import ArenaStore


def _open(url: str, create: bool, lazy: bool) -> "ArenaStore":  # noqa: ARG001 - its server creates it
    from ec_store.arena.store import ArenaStore  # noqa: PLC0415

    return ArenaStore(arena_options(url))


BACKEND = Backend(check=arena_options, open=_open)
