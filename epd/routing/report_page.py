"""Parser of an instance's metrics page: its load and its namespace."""

import re
from collections import Counter
from collections.abc import Iterator

from epd.routing.load import Report

RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
"""vLLM's gauges, one sample for each engine (`PrometheusStatLogger`,
vllm/v1/metrics/loggers.py)."""

MAX_REQUESTS = 100_000
"""Upper bound of one engine's requests. A larger value is invalid."""

MAX_SAMPLES = 1024
MAX_LINE_BYTES = 4096

NAMESPACE = b"vllm:ec_store_namespace_info"
"""The gauge of our connector, one sample for each engine (`ec_store.vllm_connector.metrics`)."""

_NAMED = re.compile(rb'[{,]namespace="([^"\\]{1,256})"')
_ENGINE = re.compile(rb"[{,]engine=\"(\d{1,4})\"")


def read_report(page: bytes) -> Report | None:
    """Return the load on a page; None if it is missing or invalid.

    Pages have hundreds of kilobytes. Only the relevant lines are parsed.
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
    """Return the common namespace of all engines on a page; empty if there is none.

    Engines with different namespaces cannot share entries, so the result is empty.
    """
    found = read_namespaces(page)
    return next(iter(found)) if len(found) == 1 else ""


def read_namespaces(page: bytes) -> frozenset[str]:
    """Return the namespaces under which the engines of a page keep encoder outputs.

    A sample of 0 marks a namespace that the engine no longer has. An unreadable page has none.
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
    """Return the engine and the value of each sample.

    Raises:
        ValueError: a value is not a number of requests.
    """
    return map(_sample, _lines(page, name))


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the labels and the value of each sample.

    Raises:
        ValueError: there are too many samples, or a line is too long.
    """
    begins = b"\n" + name
    found = page.find(begins)
    samples = 0
    while found >= 0:
        after = found + len(begins)
        if page[after : after + 1] in {b"{", b" "}:  # else a metric with a longer name
            samples += 1
            end = page.find(b"\n", after, after + MAX_LINE_BYTES)
            if samples > MAX_SAMPLES or end < 0:
                raise ValueError("not a metrics page of one server")
            yield page[after:end]
        found = page.find(begins, after)


def _sample(line: bytes) -> tuple[int, int]:
    labels, _, after = line.rpartition(b"}")
    value, *_ = (*after.split(), b"")
    number = float(value)
    if not 0 <= number <= MAX_REQUESTS:
        raise ValueError("not a number of requests")
    engine = _ENGINE.search(labels)
    return int(engine[1]) if engine else 0, int(number)
