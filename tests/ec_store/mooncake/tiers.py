"""Tiers in Mooncake, and what their tests look at."""

from collections.abc import Iterator
from contextlib import contextmanager

from ec_store.mooncake.program import Program, Running
from ec_store.mooncake.tier import MooncakeTier
from tests.ec_store.waiting import until

SEGMENT = "segment=64MiB&max_entry_bytes=16MiB"


@contextmanager
def opened_tier(url: str) -> Iterator[MooncakeTier]:
    """Open a tier, and wait until its processes are ready."""
    tier = MooncakeTier.from_url(url)
    try:
        until(lambda: ready(tier))
        yield tier
    finally:
        tier.close()


def ready(tier: MooncakeTier) -> bool:
    programs = [tier.client.program] + ([tier.segment] if tier.segment else [])
    return all(program.running is not None for program in programs)


def running(program: Program | None) -> Running:
    assert program is not None
    assert program.running is not None
    return program.running
