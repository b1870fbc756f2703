"""What the connector costs vLLM's scheduler while the store hangs.

    .venv/bin/python scripts/bench_connector.py redis://127.0.0.1:6379 --pause $(pidof redis-server)

Stops the store's process, makes the calls that vLLM's scheduler makes for requests with a picture,
and prints the time of each; then lets the process go on.
"""

import argparse
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from ec_store.vllm_connector import ECStoreConnector

MODEL = Path(__file__).resolve().parents[1] / ".run" / "models" / "tiny-qwen2.5-vl"
STEPS = 20


class Step:
    """What vLLM's scheduler says of a step, as far as the connector reads it."""

    def __init__(self, request: Request) -> None:
        """Describe the step in which a request is new."""
        self.scheduled_new_reqs = [request]


def main() -> None:
    """Print the median and the 99th percentile of each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a store")
    parser.add_argument("--pause", type=int, help="the process that serves it")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    connector = _connector(args.model, args.url)
    if args.pause:
        os.kill(args.pause, signal.SIGSTOP)
    try:
        taken = _measure(connector, args.requests)
    finally:
        if args.pause:
            os.kill(args.pause, signal.SIGCONT)
        with suppress(OSError):
            connector.shutdown()
    print("| call | median, us | 99th percentile, us | calls |\n| --- | --- | --- | --- |")
    for name, times in taken.items():
        median, late = statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(f"| `{name}` | {median * 1e6:.0f} | {late * 1e6:.0f} | {len(times)} |")


def _connector(model: Path, url: str) -> ECStoreConnector:
    transfer = {
        "ec_connector": "ECStoreConnector",
        "ec_connector_module_path": "ec_store.vllm_connector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"store": url},
    }
    config = EngineArgs(model=str(model), dtype="float32", ec_transfer_config=transfer)
    return ECStoreConnector(config.create_engine_config(), ECConnectorRole.SCHEDULER)


def _measure(connector: ECStoreConnector, requests: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(call: Callable[..., object], *arguments: Any) -> None:
        started = time.perf_counter()
        call(*arguments)
        taken[call.__name__].append(time.perf_counter() - started)

    for number in range(requests):
        request = _request(number)
        for _ in range(STEPS):
            timed(connector.ensure_cache_available, request, 0)
        timed(connector.has_cache_item, request.mm_features[0].identifier)
        timed(connector.update_state_after_alloc, request, 0)
        timed(connector.build_connector_meta, Step(request))
        timed(connector.take_unavailable_requests)
        timed(connector.request_finished, request)
        timed(connector.get_ec_connector_stats)
    return taken


def _request(number: int) -> Request:
    data = MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(torch.ones(shape), MultiModalBatchedField())
            for name, shape in (("image_grid_thw", (3,)), ("pixel_values", (4, 6)))
        }
    )
    where = PlaceholderRange(offset=0, length=4)
    feature = MultiModalFeatureSpec(data, "image", f"picture-{number}", where)
    return Request(
        f"request-{number}", [1] * 8, SamplingParams(max_tokens=1), None, mm_features=[feature]
    )


if __name__ == "__main__":
    main()
