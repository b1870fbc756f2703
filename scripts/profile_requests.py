"""Profile of `epd serve` under the scenarios of `epd bench overhead`, as a Markdown table.

    PYTHONPATH=. .venv/bin/python scripts/profile_requests.py --seconds 10 text-json picture-100kb

A signal by CPU time (`ITIMER_PROF`) samples the event loop's stack. Time in native code, system
calls included, counts for the Python function that called it, or that runs next if the event loop
itself called it. A sample belongs to the part of its innermost function that a rule of `PARTS`
names.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import orjson

from epd.__main__ import main as epd
from epd.tools.bench.rig import EPD, Contender, Rig
from epd.tools.bench.scenarios import SCENARIOS, Scenario

INTERVAL_S = 0.002
WITHOUT_STORE = "--ec-store {ec_store} "
REST = "the rest: event loop, tasks"

PARTS: Mapping[str, Sequence[str]] = {
    "writes to the instances' sockets": [
        "epd/http/connection.py:Connection.send_request",
        "epd/http/connection.py:Connection._send",
        "epd/http/connection.py:_batches",
    ],
    "writes to the client's socket": [
        "aiohttp/http_writer.py:StreamWriter._write",
        "epd/request/stream.py:StreamRelay._write",
        "epd/server/responses.py:WholeResponse.prepare",
    ],
    "aiohttp's server: heads, bodies as they arrive, the task of a request": [
        "aiohttp/streams.py",
        "aiohttp/web_protocol.py",
        "aiohttp/web_app.py",
        "aiohttp/web_request.py",
        "aiohttp/base_protocol.py",
        "yarl/",
    ],
    "aiohttp's response": ["aiohttp/"],
    "checks of the HTTP edge": ["epd/edge/protocol.py", "epd/edge/request_head.py", "epd/edge/"],
    "id and context of the request, forwarded headers": ["epd/server/middlewares.py:_new_visit"],
    "end of the request: log line, metrics, /ui": [
        "epd/server/middlewares.py:_emit_record",
        "epd/observe/",
        "epd/ui/",
        "epd/events.py",
    ],
    "deadline, authentication, admission": [
        "epd/server/intake.py:serve_request",
        "epd/server/intake.py:_limit_s",
        "epd/server/intake.py:_authenticate",
        "epd/edge/admission.py",
        "epd/edge/drain.py",
    ],
    "the body: read, limits, fingerprint, cut, parsed, checked": [
        "epd/server/intake.py",
        "epd/api/",
        "epd/routing/fatal.py:fingerprint",
    ],
    "response headers": ["epd/server/responses.py", "epd/server/api_routes.py"],
    "keys of the items, their headers": [
        "epd/encoder_cache/keys.py",
        "epd/encoder_cache/identity.py",
        "epd/media/",
    ],
    "the store: lookup, claim, release": ["epd/encoder_cache/", "ec_store/"],
    "relay of the stream": ["epd/request/stream.py", "epd/api/sse.py"],
    "parsing of the instances' answers": [
        "epd/http/connection.py:Connection.data_received",
        "epd/http/connection.py:Connection._pour_received",
        "epd/http/http1.py:AnswerReader",
        "epd/json_or_none.py",
    ],
    "upstream connections, heads of upstream requests": ["epd/http/", "epd/upstream.py"],
    "choice of instances, their load and health": ["epd/routing/", "epd/request/targets.py"],
    "encode stage, without its HTTP request": ["epd/request/encode", "epd/request/placement.py"],
    "prefill and decode stage, without their HTTP requests": [
        "epd/request/stages.py",
        "epd/request/prefill_decode.py",
        "epd/request/kv_",
        "epd/transfer/",
    ],
    "pipeline: policy, attempt, bodies for the instances": [
        "epd/request/",
        "epd/policies/",
        "epd/server/policies_api.py",
    ],
    "middleware, configuration": ["epd/"],
}
"""Beginnings of `file:function` by part. The longest one that fits a function decides."""

RULES = {start: part for part, starts in PARTS.items() for start in starts}


def part_of(stack: Sequence[str]) -> str:
    """Return the part of a stack, the innermost function first."""
    for function in stack:
        fitting = [start for start in RULES if function.startswith(start)]
        if fitting:
            return RULES[max(fitting, key=len)]
    return REST


def sample_epd(out: Path, arguments: Sequence[str]) -> None:
    """Run `epd` in this process; from SIGUSR1 on, sample it, and write the samples at its end."""
    samples: Counter[tuple[str, ...]] = Counter()

    def record(_: int, frame: FrameType | None) -> None:
        samples[tuple(_functions(frame))] += 1

    def start(*_: object) -> None:
        signal.signal(signal.SIGPROF, record)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    signal.signal(signal.SIGUSR1, start)
    sys.argv = ["epd", *arguments]
    try:
        epd()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write_bytes(orjson.dumps([*samples.items()]))


def _functions(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        path = frame.f_code.co_filename
        for mark in ("/site-packages/", "/epd/", "/ec_store/"):
            before, found, after = path.partition(mark)
            if found:
                path = after if mark == "/site-packages/" else mark[1:] + after
                break
            path = before
        yield f"{path}:{frame.f_code.co_qualname}"
        frame = frame.f_back


class Profile(NamedTuple):
    """Profile of one scenario.

    Attributes:
        title: scenario, as a column head.
        cpu_ms: CPU time of a request in milliseconds, samples included.
        parts: number of samples by part.
    """

    title: str
    cpu_ms: float
    parts: Counter[str]


def profile_scenario(scenario: Scenario, seconds: float, *, with_store: bool) -> Profile:
    """Run a scenario on `epd serve`, and return the profile of the proxy."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="epd-profile-") as made:
        folder = Path(made)
        out = folder / "samples.json"
        program = f"{shlex.quote(str(Path(__file__).resolve()))} --sample {out}"
        line = EPD if with_store else EPD.replace(WITHOUT_STORE, "")
        contender = Contender.parse(f"epd={line.replace('-m epd', program, 1)}")
        rig = Rig([contender], folder, f"file://{folder}/store?max_bytes=256MiB", proxy_cores=1)
        with rig.run_contenders(prefill=scenario.prefill) as running:
            [only] = running.contenders
            rig.warm_up(scenario, only)
            os.kill(only.process.pid, signal.SIGUSR1)
            measured = rig.measure(scenario, only, seconds)
        parts: Counter[str] = Counter()
        for stack, count in orjson.loads(out.read_bytes()):
            parts[part_of(stack)] += count
        return Profile(scenario.title, measured.cpu_ms, parts)


def table(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield the lines of a table with the parts' shares in percent."""
    heads = [f"{profile.title} ({profile.parts.total()} samples)" for profile in profiles]
    yield f"| part | {' | '.join(heads)} |"
    yield "| --- " * (len(profiles) + 1) + "|"
    for part in (*PARTS, REST):
        shares = [100 * profile.parts[part] / max(1, profile.parts.total()) for profile in profiles]
        if any(shares):
            yield f"| {part} | {' | '.join(f'{share:.1f}' for share in shares)} |"


def main() -> None:
    """Profile the chosen scenarios, or run as the sampled proxy."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("scenarios", nargs="*", choices=names, metavar="SCENARIO", help=f"{names}")
    parser.add_argument("--seconds", type=float, default=10.0, help="per scenario (default: 10)")
    parser.add_argument("--without-store", action="store_true", help="start without --ec-store")
    arguments = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if scenario.name in arguments.scenarios]
    store = not arguments.without_store
    profiles = [
        profile_scenario(scenario, arguments.seconds, with_store=store) for scenario in chosen
    ]
    print("\n".join(table(profiles)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        sample_epd(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
