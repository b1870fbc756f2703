"""Examination of a fleet: collect the facts, send the trial requests, and judge them."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TypeVar

from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.http.pool import Pool
from epd.http.tls import upstream_context
from epd.request.kv_peers import PeerRegistry
from epd.request.stages import Stages
from epd.routing.instances import CONSUMERS, Role
from epd.routing.table import InstanceTable, Reservation
from epd.tools.doctor import checks, facts
from epd.tools.doctor.checks import judge, judge_trials
from epd.tools.doctor.facts import InstanceFacts, Trial
from epd.tools.doctor.findings import Finding, by_severity
from epd.tools.doctor.host import has_no_device, read_host
from epd.tools.doctor.instances import InstanceReader, try_subscription
from epd.tools.doctor.kv_bandwidth import PairFacts
from epd.tools.doctor.sources import read_sources
from epd.tools.doctor.store import read_store
from epd.tools.doctor.trials import TrialFailed, TrialOutput, Trials
from epd.transfer.encoded import OutputFacts
from epd.transfer.registry import EC_TRANSFERS, KV_TRANSFERS
from epd.upstream import KEEP_ALIVE_S, Upstream

First = TypeVar("First")
Second = TypeVar("Second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Times in seconds that the examination waits.

    Attributes:
        idle_s: time for which an instance must keep an idle connection: a little longer than the
            proxy does.
        read_s: deadline for the prefill of a conversation's second turn: a handshake and some
            blocks. An instance that waits for blocks in vain never answers.
        counted_s: deadline for a KV transfer in the metrics of its instance. vLLM counts it with a
            later step of its scheduler.
        arrives_s: deadline for a new entry in the store: encode instances write in the background.
    """

    idle_s: float = KEEP_ALIVE_S + 0.5
    read_s: float = 10.0
    counted_s: float = 3.0
    arrives_s: float = 5.0


class Examination:
    """Trial requests to the instances that can be used, and their results.

    Attributes:
        output: first output of an encode instance.
        pairs: measured pairs of prefill and decode.
    """

    def __init__(self, instances: Sequence[InstanceFacts], model: str, trials: Trials) -> None:
        self._instances = instances
        self._model = model
        self._trials = trials
        self.output: TrialOutput | None = None
        self.pairs: list[PairFacts] = []

    def _of_roles(self, *roles: Role) -> Sequence[InstanceFacts]:
        return [engine for engine in self._instances if engine.instance.role in roles]

    async def try_encode(self) -> None:
        """Let each encode instance encode, and each consumer find the first output.

        Without encode instances, the consumers encode.
        """
        for encoder in self._of_roles(Role.ENCODE) or self._of_roles(*CONSUMERS):
            output = await self._encode(encoder)
            if output is not None and not output.encoded.metadata:
                encoder.add_trial(facts.RAW, Trial())
        if self.output is not None and self.output.encoded.metadata:
            # An engine that sends blocks to an address crashes on a request without one.
            alone = (Role.PREFILL,) if self._trials.prefills_alone else ()
            for consumer in self._of_roles(*alone, Role.PREFILL_DECODE):
                request = self._trials.consume(consumer.instance, self.output)
                await _record(consumer, facts.CONSUME, request)

    async def try_pushes(self) -> None:
        """Try pushes so that each encode instance and each rank of a consumer takes part."""
        consumers = {
            engine.instance: engine for engine in self._of_roles(Role.PREFILL, Role.PREFILL_DECODE)
        }
        table = InstanceTable(consumers)
        ranks = [
            table.reserve_place(instance) for instance in consumers for _ in range(instance.dp_size)
        ]
        for encoder, rank in _pairs(self._of_roles(Role.ENCODE), ranks):
            output = await self._encode(encoder, rank)
            if output is not None and output.encoded.metadata:
                request = self._trials.consume(rank.instance, output)
                await _record(consumers[rank.instance], facts.CONSUME, request)

    async def _encode(
        self, encoder: InstanceFacts, consumer: Reservation | None = None
    ) -> TrialOutput | None:
        request = self._trials.encode(encoder.instance, self._model, consumer)
        output = await _record(encoder, facts.ENCODE, request)
        if output is not None and output.encoded.namespace is not None:
            encoder.namespaces |= {output.encoded.namespace}
        self.output = self.output or output
        return output

    async def try_handovers(self) -> None:
        """Let each prefill instance hand over to a decode instance, and each decode continue."""
        trials, model = self._trials, self._model
        for prefill, decode in _pairs(self._of_roles(Role.PREFILL), self._of_roles(Role.DECODE)):
            pair = prefill.instance, decode.instance
            try:
                keeps = await trials.transfer(*pair, model)
            except ProxyError as error:
                if error.stage == "decode":
                    prefill.add_trial(facts.PREFILL, Trial())
                    decode.add_trial(facts.DECODE, Trial(str(error)))
                else:
                    prefill.add_trial(facts.PREFILL, Trial(str(error)))
                continue
            prefill.add_trial(facts.PREFILL, Trial())
            decode.add_trial(facts.DECODE, Trial())
            max_tokens = min(engine.max_model_len(model) for engine in (prefill, decode))
            try:
                measured = await trials.kv_bandwidth(*pair, model, max_tokens)
            except ProxyError as error:
                measured = PairFacts(*pair, problem=str(error))
            if measured is not None:
                self.pairs.append(replace(measured, in_host_memory=has_no_device(*pair)))
            if keeps and trials.reads_back:
                await _record(prefill, facts.READ, trials.read_back(*pair, model))
            elif trials.reads_back:
                decode.add_trial(facts.FORGET, Trial())


async def _record(engine: InstanceFacts, stage: str, request: Awaitable[First]) -> First | None:
    """Record whether a request succeeds, and return its result."""
    try:
        result = await request
    except (ProxyError, TrialFailed) as error:
        engine.add_trial(stage, Trial(str(error), getattr(error, "status", None)))
        return None
    engine.add_trial(stage, Trial())
    return result


def _pairs(firsts: Sequence[First], seconds: Sequence[Second]) -> Iterable[tuple[First, Second]]:
    """Return pairs in which each one of both takes part; none if one of both is empty."""
    pairs = zip(cycle(firsts), cycle(seconds), strict=False)
    return islice(pairs, max(len(firsts), len(seconds)))


async def examine(
    config: ProxyConfig, *, requests: bool, waits: Waits | None = None
) -> list[Finding]:
    """Return all findings; with `requests`, send the instances small ones of one output token."""
    waits = waits or Waits()
    sources = await read_sources(config)
    pool = Pool(upstream_context(config.upstream_ca_file), keep_alive_s=KEEP_ALIVE_S)
    pool.verify_as(sources.names)
    try:
        reader = InstanceReader(pool, headers_of(config), config.health_timeout_s, waits.idle_s)
        instances = await asyncio.gather(*map(reader.read_instance, sources.instances))
        usable: Sequence[InstanceFacts] = [engine for engine in instances if not engine.problem]
        output, pairs = await _try_all(config, usable, Upstream(pool), waits, requests=requests)
    finally:
        await pool.close()
    findings = [*judge(checks.HOST, read_host(config)), *sources.findings]
    if (config.encodes or config.ec_store) and EC_TRANSFERS[config.ec_transfer].stored:
        store = await read_store(config, output, waits.arrives_s)
        findings += judge(checks.STORE, store, "store")
        if store.is_full:  # consumers could only fail
            for engine in usable:
                engine.trials.pop(facts.CONSUME, None)
    for engine in instances:
        findings += [*judge(checks.INSTANCE, engine, engine.name), *judge_trials(engine)]
    findings += judge(checks.FLEET, usable)
    for pair in pairs:
        findings += judge(checks.PAIR, pair, pair.name)
    return by_severity(findings)


async def _try_all(
    config: ProxyConfig,
    instances: Sequence[InstanceFacts],
    upstream: Upstream,
    waits: Waits,
    *,
    requests: bool,
) -> tuple[OutputFacts | None, Sequence[PairFacts]]:
    """Send the trial requests; return an encoder output, and the measured pairs of instances."""
    if config.kv_events:
        for engine in instances:
            if engine.instance.role in config.content_roles:
                addresses, timeout_s = config.kv_events_addrs, config.health_timeout_s
                trial = await try_subscription(engine.instance, addresses, timeout_s)
                engine.add_trial(facts.EVENTS, trial)
    model = next((model.name for engine in instances for model in engine.models), None)
    if not requests or model is None:
        return None, ()
    encoded = EC_TRANSFERS[config.ec_transfer]
    transfer = KV_TRANSFERS[config.kv_transfer]()
    peers = PeerRegistry(InstanceTable(), transfer, upstream, config)
    stages, headers = Stages(upstream), headers_of(config)
    trials = Trials(
        stages, encoded, transfer, peers, headers, config, waits.read_s, waits.counted_s
    )
    examination = Examination(instances, model, trials)
    if encoded.pushed:
        await examination.try_pushes()
    elif config.encodes or config.ec_store:
        await examination.try_encode()
    await examination.try_handovers()
    output = examination.output
    return None if output is None else output.encoded, examination.pairs


def headers_of(config: ProxyConfig) -> dict[str, str]:
    """Return the headers that the proxy sends to instances for a client without a key."""
    key = config.openai_api_key
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
