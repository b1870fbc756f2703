"""Run of a model's cases on one stack of real engines."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import httpx

from epd.routing.instances import Role
from epd.routing.reports import samples
from epd.tools.bench.answer import TOLERANCES, Answer, differences
from epd.tools.up.engine import Engine
from epd.tools.up.process import ProcessDied
from epd.tools.up.topology import Topology
from scripts.forked import ForkedStack
from scripts.make_media import MEDIA
from scripts.matrix.asking import alone, apart, ask
from scripts.matrix.cases import AT_ONCE, Case, Request, cases, distinct
from scripts.matrix.results import CaseResult, Outcome, Result
from scripts.matrix.subjects import Subject

REQUESTS = "vllm:request_success_total"
PREPROCESSED = "vllm:mm_cache_queries_total"
"""Metric of an engine: items for which it got the media."""
LOST = ("misses", "timeouts", "errors", "misfits", "failed_requests", "exceptions")
"""Counters of the connector for entries that a consumer did not get."""
SLOW_S = 4.0
"""Excess over the engine's own time above which a request is noted, in seconds.

Computation causes no such excess: it is near the connector's wait of 5 s for a promised entry.
"""
LOOK_UP_S = 2
"""Time limit of a lookup, in seconds, so that hits do not depend on the load of the machine."""


def run(
    subject: Subject, topology: str, models: Path, folder: Path, report: Callable[[str], None]
) -> Result:
    """Start a model's stack, send all requests, and stop the stack."""
    result = Result(
        subject.name,
        topology,
        version("vllm"),
        datetime.now(UTC).date().isoformat(),
        subject.dtype,
    )
    started = time.monotonic()
    with ExitStack() as running:
        stack = ForkedStack(
            models / subject.name,
            Topology.parse(topology),
            folder,
            local_media=MEDIA,
            flags=subject.flags(),
            proxy_flags=["--ec-store-budget-s", str(LOOK_UP_S), "--trust-request-mm-kwargs"],
            report=lambda _: None,
        )
        try:
            running.enter_context(stack)
            client = running.enter_context(httpx.Client(limits=httpx.Limits(max_connections=64)))
            Examination(subject, stack, client, result, report).examine()
        except (ProcessDied, TimeoutError) as death:
            result.notes.append(summary(death))
            report(str(death))
    asked = {case.name for case in result.cases}
    result.cases += [
        CaseResult(case.name, Outcome.NOT_RUN)
        for case in cases(subject.modalities)
        if case.name not in asked
    ]
    result.seconds = round(time.monotonic() - started, 1)
    return result


class Examination:
    """Examination of a running stack: sends all requests, and records the results."""

    def __init__(
        self,
        subject: Subject,
        stack: ForkedStack,
        client: httpx.Client,
        result: Result,
        report: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._stack = stack
        self._client = client
        self._result = result
        self._report = report
        self._consumers = [engine for engine in stack.all_engines if engine.role is not Role.ENCODE]
        # The last instance to answer in either topology: decode, or the only one that is no
        # encoder.
        self._reference = self._consumers[-1]

    def examine(self) -> None:
        """Send all requests.

        Raises:
            ProcessDied: an engine ended.
        """
        # The first request through NIXL connects prefill with decode, which takes seconds.
        self._through_proxy(next(cases(())).requests[0])
        for modality in self._subject.modalities:
            answers = [self._alone(request) for request in distinct(modality)]
            distinct_answers = {tuple(answer.tokens) for answer in answers if answer.tokens}
            self._result.distinct[modality] = len(distinct_answers)
            self._report(f"  distinct {modality}s: {len(distinct_answers)}")
            self._stack.check_alive()
        for case in cases(self._subject.modalities):
            found = self._ask(case)
            self._result.cases.append(found)
            self._report(f"  {found.name}: {found.outcome} {found.detail}")
            self._stack.check_alive()

    def _ask(self, case: Case) -> CaseResult:
        expected = [self._alone(request) for request in case.requests]
        lost = self._lost()
        with ThreadPoolExecutor(AT_ONCE if case.at_once else 1) as senders:
            got = list(senders.map(self._through_proxy, case.requests))
        self._result.lost += round(self._lost() - lost)
        tolerance = TOLERANCES[self._subject.dtype]
        pairs = list(zip(expected, got, strict=True))
        found = [what for pair in pairs for what in differences(*pair, tolerance)]
        if found:
            detail = "; ".join(dict.fromkeys(found))
            if self._encoded_together(case.requests, pairs, tolerance):
                detail += " (equal to one engine that encodes the items one after another)"
            return CaseResult(case.name, Outcome.DIFFERENT, detail)
        for (expected_answer, other), request in zip(pairs, case.requests, strict=True):
            if other.seconds > expected_answer.seconds + SLOW_S and not case.at_once:
                items = f" ({other.items})" if request.media else ""
                self._result.notes.append(
                    f"{case.name}: {other.seconds:.1f} s through the proxy{items}, "
                    f"{expected_answer.seconds:.1f} s directly"
                )
        refusals = [answer.error for answer in expected if answer.is_refusal]
        if refusals:
            return CaseResult(case.name, Outcome.REFUSED, refusals[0])
        return CaseResult(case.name, Outcome.EQUAL)

    def _encoded_together(
        self, requests: Sequence[Request], pairs: Sequence[tuple[Answer, Answer]], tolerance: float
    ) -> bool:
        """Return whether the differences come from encoding the items of a request together."""
        return all(
            not any(differences(self._apart(request), got, tolerance))
            for request, (expected, got) in zip(requests, pairs, strict=True)
            if any(differences(expected, got, tolerance))
        )

    def _apart(self, request: Request) -> Answer:
        return apart(self._client, self._reference.url, self._subject.name, request)

    def _alone(self, request: Request) -> Answer:
        return alone(self._client, self._reference.url, self._subject.name, request)

    def _through_proxy(self, request: Request) -> Answer:
        if not request.seen:
            return ask(self._client, self._stack.url, self._subject.name, request)
        encodes, given = self._encodes(), self._given()
        answer = ask(self._client, self._stack.url, self._subject.name, request)
        hit = answer.items == f"hit={len(request.media)},encoded=0,local=0"
        self._result.repeats += 1
        self._result.hits += hit and self._encodes() == encodes
        self._result.sent[request.seen] = "media" if self._given() > given else "metadata"
        if not hit:
            self._result.notes.append(f"{request.seen} again: {answer.items}")
        return answer

    def _encodes(self) -> float:
        return sum(total(engine, REQUESTS) for engine in self._stack.of_role(Role.ENCODE))

    def _given(self) -> float:
        return sum(total(engine, PREPROCESSED) for engine in self._consumers)

    def _lost(self) -> float:
        names = [f"vllm:ec_store_{name}_total" for name in LOST]
        return sum(total(engine, *names) for engine in self._consumers)


def summary(death: Exception) -> str:
    """Return the error of a process that ended, without its port number and its log."""
    return re.sub(r"-\d+", "", str(death).partition(".")[0])


def total(engine: Engine, *names: str) -> float:
    """Return the sum of an engine's metrics of these names; 0 without any."""
    page = httpx.get(f"{engine.url}/metrics", timeout=60).content
    return sum(value for name in names for _, value in samples(page, name.encode()))
