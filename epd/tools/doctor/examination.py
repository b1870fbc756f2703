"""Run of `epd doctor`: collect the facts, send the trial requests, and print the findings."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from epd.check import add_settings_command, load_or_exit
from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.http.pool import Pool
from epd.http.tls import upstream_context
from epd.parser import Commands, Parser
from epd.request.kv_peers import PeerRegistry
from epd.request.stages import Stages
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable
from epd.tools.doctor import judge
from epd.tools.doctor.environment import has_no_device, judge_host, judge_logs, look_at_store
from epd.tools.doctor.facts import (
    Finding,
    InstanceFacts,
    Trial,
    Verdict,
    as_json,
    as_text,
    by_severity,
    worst_verdict,
)
from epd.tools.doctor.instances import IDLE_S, InstanceReader, read_sources, try_subscription
from epd.tools.doctor.kv_bandwidth import PairFacts, judge_pair
from epd.tools.doctor.trials import Trials, Tried, text
from epd.transfer.registry import EC_TRANSFERS, KV_TRANSFERS
from epd.upstream import Upstream


def add_parser(commands: Commands) -> None:
    """Add `doctor` to the commands of `epd`."""
    parser = commands.add_parser(
        "doctor",
        help="examine the fleet that `epd serve` would use with the same flags",
        description="Examine every instance, the store and this machine as the proxy would use "
        "them, and report what to change. Each stage gets a small request for one token, to verify "
        "its work; a new picture is written to the store. To measure KV transfers, each pair of "
        "prefill and decode instances gets a prompt of up to 1 GB of KV blocks, at most three "
        "times. The exit code is 1 if requests would fail or be slow.",
        epilog="example: epd doctor --config epd.yaml",
        usage="epd doctor [--no-requests] [--format text|json] [FLAG of epd serve ...]",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="format of the output (default: text)",
    )
    parser.add_argument(
        "--no-requests",
        action="store_true",
        help="read only what instances report; send no generation requests",
    )
    parser.add_argument(
        "--engine-logs",
        type=Path,
        default=Path("logs"),
        metavar="FOLDER",
        help="folder with the logs of engines, which show why one has ended (default: logs, that "
        "of `epd up`)",
    )
    add_settings_command(parser, _run)


class Examined:
    """Fleet under examination: the facts about its instances so far."""

    def __init__(self, facts: Sequence[InstanceFacts]) -> None:
        self._facts = {fact.instance: fact for fact in facts}
        self.tried: Tried | None = None
        self.pairs: list[PairFacts] = []

    @property
    def instance_facts(self) -> Sequence[InstanceFacts]:
        return tuple(self._facts.values())

    @property
    def model(self) -> str | None:
        """Name of a model that requests can ask for; None: no instance serves one."""
        return next((model.name for fact in self.instance_facts for model in fact.models), None)

    def max_tokens(self, model: str, *instances: Instance) -> int:
        """Return the longest request that these instances accept; 0 if they do not report it."""
        lengths = [
            found.max_model_len or 0
            for instance in instances
            for found in self._facts[instance].models
            if found.name == model
        ]
        return min(lengths, default=0)

    def answering_instances(self, *roles: Role) -> list[Instance]:
        return [
            instance
            for instance, fact in self._facts.items()
            if instance.role in roles and fact.problem is None
        ]

    def note_trials(self, instance: Instance, trials: Mapping[str, Trial]) -> None:
        """Record the results of requests; the first failure of each stage stays."""
        facts = self._facts[instance]
        failed = {stage: trial for stage, trial in facts.trials.items() if trial.problem}
        self._facts[instance] = replace(facts, trials={**facts.trials, **trials, **failed})

    def encoded(self, instance: Instance, tried: Tried) -> None:
        """Record the output of an encode instance, and the namespace that it reports."""
        facts, own = self._facts[instance], tried.encoded.namespace
        if own is not None:
            self._facts[instance] = replace(facts, namespaces=facts.namespaces | {own})
        self.tried = self.tried or tried


async def examine(config: ProxyConfig, *, requests: bool) -> list[Finding]:
    """Return all findings; with `requests`, send the instances small ones of one output token."""
    headers = headers_of(config)
    async with (
        Upstream.connect(config.connect_timeout_s, config.upstream_ca_file) as upstream,
        _pool(config) as pool,
    ):
        called = await read_sources(config)
        upstream.verify_as(called.names)
        pool.verify_as(called.names)
        reader = InstanceReader(upstream, pool, headers, config.health_timeout_s)
        fleet = Examined(await asyncio.gather(*map(reader.read_instance, called.instances)))
        if config.kv_events:
            await _try_events(fleet, config)
        if requests and fleet.model is not None:
            encoded = EC_TRANSFERS[config.ec_transfer]()
            transfer = KV_TRANSFERS[config.kv_transfer]()
            peers = PeerRegistry(InstanceTable(), transfer, upstream, config)
            trials = Trials(Stages(upstream), encoded, transfer, peers, headers, config)
            encode = _try_pushes if encoded.pushed else _try_encode
            await encode(fleet, trials, fleet.model)
            await _try_handovers(fleet, trials, fleet.model)
    made = None if fleet.tried is None else fleet.tried.encoded
    store = None if config.ec_store is None else await look_at_store(config.ec_store, made)
    full = judge.is_full(store)
    return by_severity(
        [
            *judge_host(config),
            *called.findings,
            *(judge.judge_store(config, store) if EC_TRANSFERS[config.ec_transfer].stored else ()),
            *(
                finding
                for fact in fleet.instance_facts
                for finding in judge.judge_instance(fact, full=full)
            ),
            *judge.judge_fleet(fleet.instance_facts),
            *(finding for pair in fleet.pairs for finding in judge_pair(pair)),
        ]
    )


async def _try_events(fleet: Examined, config: ProxyConfig) -> None:
    for instance in fleet.answering_instances(*config.content_roles):
        addresses = config.kv_events_addrs
        trial = await try_subscription(instance, addresses, config.health_timeout_s)
        fleet.note_trials(instance, {judge.EVENTS: trial})


async def _try_encode(fleet: Examined, trials: Trials, model: str) -> None:
    for instance in fleet.answering_instances(Role.ENCODE):
        trial, tried = await trials.encode(instance, model)
        fleet.note_trials(instance, {judge.ENCODE: trial})
        if tried is not None:
            fleet.encoded(instance, tried)
            if not tried.encoded.metadata:
                fleet.note_trials(instance, {judge.RAW: Trial()})
    if fleet.tried is not None and fleet.tried.encoded.metadata:
        # An engine that sends blocks to an address crashes on a request without one.
        alone = (Role.PREFILL,) if trials.prefills_alone else ()
        for instance in fleet.answering_instances(*alone, Role.PREFILL_DECODE):
            trial = await trials.consume(instance, fleet.tried)
            fleet.note_trials(instance, {judge.CONSUME: trial})


async def _try_pushes(fleet: Examined, trials: Trials, model: str) -> None:
    """Try pushes so that each encode instance and each rank of a consumer takes part."""
    encoders = fleet.answering_instances(Role.ENCODE)
    consumers = fleet.answering_instances(Role.PREFILL, Role.PREFILL_DECODE)
    table = InstanceTable(consumers)
    ranks = [
        table.reserve_place(consumer) for consumer in consumers for _ in range(consumer.dp_size)
    ]
    if not encoders or not ranks:
        return
    pairs = max(len(encoders), len(ranks))
    for encoder, consumer in islice(zip(cycle(encoders), cycle(ranks), strict=False), pairs):
        trial, tried = await trials.encode(encoder, model, consumer)
        fleet.note_trials(encoder, {judge.ENCODE: trial})
        if tried is not None and tried.encoded.metadata:
            seen = await trials.consume(consumer.instance, tried)
            fleet.note_trials(consumer.instance, {judge.CONSUME: seen})


async def _try_handovers(fleet: Examined, trials: Trials, model: str) -> None:
    prefills = fleet.answering_instances(Role.PREFILL)
    decodes = fleet.answering_instances(Role.DECODE)
    if not prefills or not decodes:
        return
    pairs = max(len(prefills), len(decodes))
    for prefill, decode in islice(zip(cycle(prefills), cycle(decodes), strict=False), pairs):
        became = dict(await trials.transfer(prefill, decode, text(model)))
        fleet.note_trials(prefill, {judge.PREFILL: became.pop(judge.PREFILL)})
        fleet.note_trials(decode, became)
        if judge.DECODE not in became or became[judge.DECODE].problem:
            continue
        await _try_bandwidth(fleet, trials, prefill, decode)
        if not trials.reads_back:
            continue
        if became[judge.DECODE].keeps:
            fleet.note_trials(prefill, {judge.READ: await trials.read_back(prefill, decode, model)})
        else:
            fleet.note_trials(decode, {judge.FORGET: Trial()})


async def _try_bandwidth(
    fleet: Examined, trials: Trials, prefill: Instance, decode: Instance
) -> None:
    model = fleet.model or ""
    try:
        found = await trials.kv_bandwidth(
            prefill, decode, model, fleet.max_tokens(model, prefill, decode)
        )
    except ProxyError as error:
        found = PairFacts(prefill, decode, problem=str(error))
    if found is not None:
        fleet.pairs.append(replace(found, in_host_memory=has_no_device(prefill, decode)))


@asynccontextmanager
async def _pool(config: ProxyConfig) -> AsyncIterator[Pool]:
    tls = upstream_context(config.upstream_ca_file)
    pool = Pool(tls, connect_timeout_s=config.connect_timeout_s, keep_alive_s=2 * IDLE_S)
    try:
        yield pool
    finally:
        await pool.close()


def headers_of(config: ProxyConfig) -> dict[str, str]:
    """Return the headers that the proxy sends to instances for a client without a key."""
    key = config.openai_api_key
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}


def _run(
    parser: Parser,
    *,
    format: str,  # noqa: A002 - a flag's name
    no_requests: bool,
    engine_logs: Path,
    **flags: Any,
) -> None:
    """Print the findings. Exit with code 1 if one of them is `fail`."""
    config = load_or_exit(parser, flags).config
    findings = asyncio.run(examine(config, requests=not no_requests))
    if worst_verdict(findings) is Verdict.FAIL:
        findings = by_severity([*findings, *judge_logs(engine_logs)])
    print(as_json(findings) if format == "json" else as_text(findings))
    if worst_verdict(findings) is Verdict.FAIL:
        sys.exit(1)
