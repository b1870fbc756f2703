"""What an instance says on its page of metrics: what it has to do, and its namespace."""

import re
from collections import Counter
from collections.abc import Iterator

from epd.routing.load import Report

RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
"""vLLM's gauges, a sample for each engine (`PrometheusStatLogger`, vllm/v1/metrics/loggers.py)."""

MAX_REQUESTS = 100_000
"""Of one engine. Who says more does not mean requests."""

MAX_SAMPLES = 1024
MAX_LINE_BYTES = 4096

NAMESPACE = b"vllm:ec_store_namespace_info"
"""Our connector's gauge, a sample for each engine (`ec_store.vllm_connector.metrics`)."""

_NAMED = re.compile(rb'[{,]namespace="([^"\\]{1,256})"')
_ENGINE = re.compile(rb"[{,]engine=\"(\d{1,4})\"")


def read_report(page: bytes) -> Report | None:
    """What it says; None: nothing that can be.

    Pages are hundreds of kilobytes, of which these lines alone are looked at.
    """
    try:
        running, waiting = dict(_samples(page, RUNNING)), dict(_samples(page, WAITING))
    except ValueError:
        return None
    if not running or running.keys() != waiting.keys():
        return None
    engines = Counter(running)
    engines.update(waiting)
    return Report(sum(waiting.values()), sum(running.values()), dict(engines))


def read_namespace(page: bytes) -> str:
    """Return under which namespace all engines of a page keep encoder outputs; empty: under none.

    Engines that differ cannot share entries, so the result is empty.
    """
    found = read_namespaces(page)
    return next(iter(found)) if len(found) == 1 else ""


def read_namespaces(page: bytes) -> frozenset[str]:
    """Return under which namespaces the engines of a page keep encoder outputs.

    A sample of 0 is a namespace that the engine does not have any longer. Nothing is returned of
    a page that cannot be read.
    """
    try:
        samples = [line.rpartition(b"}") for line in _lines(page, NAMESPACE)]
        labels = [one for one, _, value in samples if float((*value.split(), b"")[0]) != 0]
        return frozenset(
            named[1].decode() if (named := _NAMED.search(one)) else "" for one in labels
        )
    except ValueError:
        return frozenset()


def _samples(page: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """The engine and the value of each.

    Raises:
        ValueError: one is no number of requests.
    """
    return map(_sample, _lines(page, name))


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the labels and the value of each sample.

    Raises:
        ValueError: there are too many, or one does not end.
    """
    begins = b"\n" + name
    found = page.find(begins)
    samples = 0
    while found >= 0:
        after = found + len(begins)
        if page[after : after + 1] in {b"{", b" "}:  # else it is another, with a longer name
            samples += 1
            end = page.find(b"\n", after, after + MAX_LINE_BYTES)
            if samples > MAX_SAMPLES or end < 0:
                raise ValueError("no page of one server's")
            yield page[after:end]
        found = page.find(begins, after)


def _sample(line: bytes) -> tuple[int, int]:
    labels, _, after = line.rpartition(b"}")
    value, *_ = (*after.split(), b"")
    number = float(value)
    if not 0 <= number <= MAX_REQUESTS:
        raise ValueError("no number of requests")
    engine = _ENGINE.search(labels)
    return int(engine[1]) if engine else 0, int(number)
