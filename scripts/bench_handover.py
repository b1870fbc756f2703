"""Measure the time from an encode's answer until the consumer's step may use the entry.

It starts two vLLM engines on the CPU for each store, with a Qwen2.5-VL of two layers with hidden
size 3,584 in float32, and one picture of 2,304 tokens (33 MB) per round. The consumer has prepared
the picture before the encode's answer.

    PYTHONPATH=. .venv/bin/python scripts/bench_handover.py --rounds 10
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

# vLLM reads these variables when it is imported.
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from ec_store.vllm_connector import ECStoreConnector
from epd.tools.models.qwen import ROPE
from epd.tools.models.qwen_vl import WINDOWED, qwen2_5_vl
from scripts.memory_server import serving

SIDE = 48 * 28
"""Side of a picture of 48 x 48 tokens in pixels."""

COLUMNS = 3584
HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 1024}
TEXT = {
    **HEADS,
    "hidden_size": COLUMNS,
    "rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]},
    "max_position_embeddings": 4096,
}
SPAWN = multiprocessing.get_context("spawn")

looked_s: list[float] = []
"""Times at which the scheduler of this process looked for entries."""

usable_s: list[float] = []
"""Times at which steps of this process had their entries."""


class TimedConnector(ECStoreConnector):
    """Connector that records when the scheduler looks for entries, and when a step has them."""

    def ensure_cache_available(self, *args: Any, **kwargs: Any) -> bool:
        looked_s.append(time.perf_counter())
        return super().ensure_cache_available(*args, **kwargs)

    def start_load_caches(self, encoder_cache: Any, *args: Any, **kwargs: Any) -> None:
        before = len(encoder_cache)
        super().start_load_caches(encoder_cache, *args, **kwargs)
        if len(encoder_cache) > before:
            usable_s.append(time.perf_counter())


class Engine:
    """Engine in this process, for one request at a time."""

    def __init__(self, model: Path, role: str, store: str) -> None:
        transfer = {
            "ec_connector": "TimedConnector",
            "ec_connector_module_path": "scripts.bench_handover",
            "ec_role": role,
            "ec_connector_extra_config": {"store": store, "timeout_s": 30},
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                ec_transfer_config=transfer,
                enforce_eager=True,
                max_model_len=4096,
                max_num_batched_tokens=4096,
                enable_prefix_caching=False,
                distributed_executor_backend=("vllm.v1.executor.uniproc_executor.UniProcExecutor"),
            )
        )

    def prepare(self, number: int) -> Any:
        """Return the request of a picture, which the engine has not seen yet."""
        pixels = np.random.default_rng(number).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
        prompt = {
            "prompt": "<|vision_start|><|image_pad|><|vision_end|>",
            "multi_modal_data": {"image": Image.fromarray(pixels)},
        }
        return self._engine.input_processor.process_inputs(
            str(number),
            prompt,
            SamplingParams(max_tokens=1, temperature=0),
            supported_tasks=self._engine.get_supported_tasks(),
        )

    def run(self, request: Any, transfer: Any = None) -> Any:
        """Run a request to its end; return the names of its entries."""
        request.sampling_params.extra_args = {"ec_transfer_params": transfer} if transfer else None
        self._engine.add_request(request.request_id, request, request.sampling_params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    return getattr(output, "ec_transfer_params", None)
        return None


def encode(model: Path, store: str, pipe: Connection) -> None:
    """Encode each picture that is asked for; send its entries, and the time of the answer."""
    engine = Engine(model, "ec_producer", store)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        transfer = engine.run(engine.prepare(number))
        pipe.send((transfer, time.perf_counter()))


def consume(model: Path, store: str, pipe: Connection) -> None:
    """Prepare a picture, wait for its entries, and send the time at which a step has them."""
    from scripts import bench_handover  # noqa: PLC0415 - the connector's module, not `__main__`

    engine = Engine(model, "ec_consumer", store)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        request = engine.prepare(number)
        pipe.send("prepared")
        engine.run(request, pipe.recv())
        usable = bench_handover.usable_s and bench_handover.usable_s[-1]
        pipe.send((bench_handover.looked_s[0], usable))
        bench_handover.usable_s.clear()
        bench_handover.looked_s.clear()


def handovers(model: Path, store: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of each handover, and those from the scheduler's first look on."""
    pipes, processes = [], []
    for target in (encode, consume):
        pipe, other = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(model, store, other), daemon=True)
        process.start()
        pipe.recv()
        pipes.append(pipe)
        processes.append(process)
    producer, consumer = pipes
    taken_s = []
    for number in range(rounds + 1):
        consumer.send(number)
        consumer.recv()
        producer.send(number)
        transfer, answered_s = producer.recv()
        consumer.send(transfer)
        looked, usable = consumer.recv()
        if not usable:
            sys.exit(f"the consumer has encoded picture {number} itself")
        taken_s.append((usable - answered_s, usable - looked))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return taken_s[1:]  # the first one allocates memory


def main() -> None:
    """Print the median handover of each store, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    medians_s = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as files,
        serving("1GiB") as (memory, _),
    ):
        urls = {"file": f"file://{files}/store?max_bytes=1GiB", "shm": f"shm://{memory}"}
        model = Path(folder) / "model"
        pixels = {"shortest_edge": 56 * 56, "longest_edge": SIDE * SIDE}
        qwen2_5_vl(TEXT, {**WINDOWED, "out_hidden_size": COLUMNS}, pixels).write(model)
        for name, url in urls.items():
            taken_s = handovers(model, url, rounds)
            medians_s[name] = [statistics.median(each) for each in zip(*taken_s, strict=True)]
            whole, looked = (1000 * median_s for median_s in medians_s[name])
            print(
                f"{name}: {whole:.1f} ms from the answer, {looked:.1f} ms from the first look of "
                f"the consumer's scheduler; medians of {rounds}",
                flush=True,
            )
    ratios = [m / f for m, f in zip(medians_s["shm"], medians_s["file"], strict=True)]
    print(f"shm / file: {ratios[0]:.2f} and {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
