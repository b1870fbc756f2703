"""Send a picture twice through a real EPD stack on this machine's CPU, and show times and store.

`demo.sh` sets up the environment and runs this script.
"""

import argparse
import base64
import json
import mimetypes
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import openai

from ec_store import open_store
from epd.routing.instances import Role
from epd.tools.up.command import DISC, looks
from epd.tools.up.process import ProcessDied
from epd.tools.up.signals import leave_contexts_on_signals
from epd.tools.up.topology import Topology
from scripts.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
MEDIA = ROOT / "examples" / "media"
RUN = ROOT / ".run"
MODEL = "tiny-qwen2.5-vl"
QUESTION = "What is in this picture?"


def main() -> None:
    """Start the stack, send a picture twice, show the results, and stop the stack."""
    args = arguments()
    # Progress must be visible at once, through a pipe too.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave_contexts_on_signals()
    if Role.PREFILL in args.topology.roles and find_spec("nixl") is None:
        sys.exit("prefill instances need NIXL: .venv/bin/pip install './ec_store' '.[nixl]'")
    models = RUN / "models"
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", models, MODEL], check=True)
    directory = Path(tempfile.mkdtemp(prefix="epd-demo-"))
    stack = Stack(models / MODEL, args.topology, directory, local_media=MEDIA, store=args.ec_store)
    try:
        with stack:
            send_twice(stack, args.picture)
            if args.keep:
                keep(stack)
    except (ProcessDied, TimeoutError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped")
    print(f"\nEverything is stopped. Logs and the store are left in {directory}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--topology",
        type=Topology.parse,
        default="1e1pd",
        help="1e1pd (default), 1e1p1d with NIXL between prefill and decode, 2e1pd, ...",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=MEDIA / "cat.jpg",
        help="picture to send (default: cat.jpg)",
    )
    parser.add_argument(
        "--ec-store", metavar="URL", help="redis://… or file:///path (default: a new folder)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the stack running until Ctrl-C")
    return parser.parse_args()


class Timed(NamedTuple):
    """Times of a request: of each stage in ms, as `Server-Timing` has them, and of its answer."""

    stages_ms: Mapping[str, float]
    first_token_s: float
    answer_s: float


def send_twice(stack: Stack, path: Path) -> None:
    """Send the same picture twice through the official client; show both times and the store."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        [model] = client.models.list()
        print(f"\n{model.id}, {path.name}: {QUESTION}\n")
        new, again = (stream_answer(client, model.id, path) for _ in range(2))
    print("\n  The model is a tiny one with random weights: the words mean nothing, the path is")
    print("  the real one.\n")
    show_times(new, again)
    show_store(stack)


def stream_answer(client: openai.OpenAI, model: str, path: Path) -> Timed:
    """Print a streamed answer, and return its times.

    The prompt is in no prefix cache, so that only the encoder's output is known in the second one.
    """
    started_s = time.monotonic()
    first_token_s = 0.0
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=[{"role": "user", "content": content(path)}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"cache_salt": secrets.token_hex(8)},
    ) as reply:
        print("  > ", end="")
        for event in reply.parse():
            first_token_s = first_token_s or time.monotonic() - started_s
            for choice in event.choices:
                print(printable(choice.delta.content or ""), end="", flush=True)
        print()
        entries = (entry.partition(";dur=") for entry in reply.headers["server-timing"].split(", "))
        stages_ms = {stage: float(ms) for stage, _, ms in entries}
    return Timed(stages_ms, first_token_s, time.monotonic() - started_s)


def content(path: Path) -> list[openai.types.chat.ChatCompletionContentPartParam]:
    media_type = mimetypes.guess_type(path.name)[0] or "image/jpeg"
    data = base64.b64encode(path.read_bytes()).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)


def show_times(new: Timed, again: Timed) -> None:
    """Print the times of both requests beside each other."""
    print("Where the time went:             new     again")
    for stage in dict.fromkeys([*new.stages_ms, *again.stages_ms]):
        what = f"{stage} (until its first byte)" if stage == "decode" else stage
        times = [each.stages_ms.get(stage) for each in (new, again)]
        shown = ["skipped" if ms is None else f"{ms / 1000:.3f} s" for ms in times]
        print(f"  {what:29} {shown[0]:7} {shown[1]:>9}")
    print(f"  {'first token':29} {new.first_token_s:.3f} s {again.first_token_s:7.3f} s")
    print(f"  {'whole answer':29} {new.answer_s:.3f} s {again.answer_s:7.3f} s")
    if "encode" in new.stages_ms and "encode" not in again.stages_ms:
        print("\nencode: skipped. The store had the encoder output of the second picture.")


def show_store(stack: Stack) -> None:
    """Print the entries of the store, and its URL."""
    print(f"\nEncoder output in {stack.store}, where the next request finds it:")
    with open_store(stack.store) as store:
        for row in store.ls():
            if row.info is not None:
                shape = " x ".join(map(str, row.info.shape))
                print(
                    f"  {row.digest}\n    {row.info.modality}, {row.info.dtype}, {shape}, ", end=""
                )
                print(f"{row.size_bytes:,} bytes, {dict(row.info.metadata)}")
                print(f"    namespace {row.info.key.namespace}")


def keep(stack: Stack) -> None:
    """Serve until Ctrl-C, or until an indispensable process has died."""
    image = {"type": "image_url", "image_url": {"url": DISC}}
    parts = [image, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 24})
    print("\nThe stack stays up until Ctrl-C. Send this twice, and see `x-epd-items`:\n")
    print(
        f"  curl -i {stack.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'\n"
    )
    print("\n".join(looks(stack)))
    with suppress(KeyboardInterrupt):
        stack.watch()


if __name__ == "__main__":
    main()
