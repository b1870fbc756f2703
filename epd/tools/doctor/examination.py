"""Examination of a fleet: collect the facts, send the trial requests, and judge them."""

import asyncio
from collections.abc import Sequence

from epd.config import ProxyConfig
from epd.http.pool import Pool
from epd.http.tls import upstream_context
from epd.routing.instances import Instance
from epd.tools.doctor import checks, facts
from epd.tools.doctor.checks import judge, judge_trials
from epd.tools.doctor.facts import InstanceFacts
from epd.tools.doctor.findings import WARN, Finding, by_severity
from epd.tools.doctor.host import read_host
from epd.tools.doctor.instances import read_instance, try_subscription
from epd.tools.doctor.kv_bandwidth import judge_pair
from epd.tools.doctor.sources import read_sources
from epd.tools.doctor.store import read_store
from epd.tools.doctor.trials import Limits, Trials
from epd.transfer.registry import load_ec_transfer
from epd.upstream import KEEP_ALIVE_S, Upstream

UNTRIED = (
    "it is not known whether it finds encoder outputs: the store is full",
    "repeat this when the store has room",
)


async def examine(
    config: ProxyConfig,
    instances: Sequence[Instance] | None = None,
    *,
    requests: bool,
    limits: Limits | None = None,
) -> list[Finding]:
    """Return all findings.

    Args:
        config: configuration of the proxy.
        instances: instances of the running proxy, from all sources but DNS; None: they are read
            from their sources.
        requests: whether to send the instances small requests of one output token.
        limits: limits of the trial requests.
    """
    limits = limits or Limits()
    sources = await read_sources(config, instances)
    pool = Pool(upstream_context(config.upstream_ca_file), keep_alive_s=KEEP_ALIVE_S)
    pool.verify_as(sources.names)
    upstream = Upstream(pool)
    try:
        engines = await asyncio.gather(
            *(read_instance(instance, upstream, config) for instance in sources.instances)
        )
        usable: Sequence[InstanceFacts] = [engine for engine in engines if not engine.problem]
        if config.kv_events:
            await _try_subscriptions(config, usable)
        model = next((model.name for engine in usable for model in engine.models), "")
        trials = Trials(config, upstream, usable, model, limits)
        if requests and model:
            await trials.run()
    finally:
        await pool.close()
    findings = [*judge(checks.HOST, read_host(config)), *sources.findings]
    if (config.encodes or config.ec_store) and load_ec_transfer(config.ec_transfer).stored:
        output = None if trials.output is None else trials.output.encoded
        store = await read_store(config, output, limits)
        findings += judge(checks.STORE, store, "store")
        if store.is_full:  # consumers could only fail
            for engine in usable:
                if engine.trials.pop(facts.CONSUME, None) is not None:
                    findings.append(Finding(WARN, engine.name, *UNTRIED))
    for engine in engines:
        findings += [*judge(checks.INSTANCE, engine, engine.name), *judge_trials(engine)]
    findings += judge(checks.FLEET, usable)
    return by_severity([*findings, *map(judge_pair, trials.pairs)])


async def _try_subscriptions(config: ProxyConfig, instances: Sequence[InstanceFacts]) -> None:
    for engine in instances:
        if engine.instance.role in config.content_roles:
            addresses, timeout_s = config.kv_events_addrs, config.health_timeout_s
            trial = await try_subscription(engine.instance, addresses, timeout_s)
            engine.add_trial(facts.EVENTS, trial)
