"""Running stack, as tests use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from ec_store import EntryInfo, open_store
from epd.routing.instances import Role
from epd.tools.up.engine import Engine
from scripts.stack import Stack
from tests.collector import Collector
from tests.e2e.stacks import (
    Spec,
)
from tests.ec_store.arena.served import Serve
from tests.support.redis_server import RedisServer


@dataclass
class Served:
    """Running stack, with a client of its proxy and a client of its decode engine alone."""

    stack: Stack
    redis: Sequence[RedisServer]
    memory: Serve | None
    spec: Spec
    client: openai.OpenAI
    baseline: openai.OpenAI
    collector: Collector
    logs: Path

    @property
    def model(self) -> str:
        return self.spec.model

    @property
    def encode(self) -> Engine:
        return self.stack.of_role(Role.ENCODE)[0]

    def log(self, engine: Engine) -> str:
        return (self.logs / f"{engine.name}.log").read_text()

    @property
    def consumers(self) -> list[Engine]:
        """Return the engines that must not encode: all but the encode engine."""
        return [engine for engine in self.stack.all_engines if engine.role is not Role.ENCODE]


def metric(engine: Engine, name: str) -> float:
    """Return a metric of an engine's own `/metrics`, summed over its labels."""
    page = httpx.get(f"{engine.url}/metrics", timeout=60).text
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert samples, f"{engine.name} has no metric {name}"
    return sum(sample.value for sample in samples)


def stored(stack: Served) -> dict[str, EntryInfo]:
    """Return the entries of the stack's store by identifier."""
    with open_store(stack.stack.store) as store:
        return {row.info.key.identifier: row.info for row in store.ls() if row.info is not None}


ENCODED = "vllm:request_success_total"

READ = "vllm:external_prefix_cache_hits_total"
"""Counter of the prompt tokens that an engine has read from another instead of computing them."""
