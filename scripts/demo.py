"""Send a picture through a real EPD stack on this machine's CPU, and show times and store.

`demo.sh` sets up the environment and runs this script.
"""

import argparse
import base64
import json
import mimetypes
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import openai

from ec_store import open_store
from epd.tools.up.command import DISC
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
    """Start the stack, send a request, show the result, and stop the stack."""
    args = arguments()
    # Progress must be visible at once, through a pipe too.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave_contexts_on_signals()
    models = RUN / "models"
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", models], check=True)
    directory = Path(tempfile.mkdtemp(prefix="epd-demo-"))
    stack = Stack(models / MODEL, args.topology, directory, local_media=MEDIA, store=args.ec_store)
    try:
        with stack:
            answer(stack, args.picture)
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


def answer(stack: Stack, path: Path) -> None:
    """Stream one response through the official client, then show its times and the store."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    [model] = client.models.list()
    print(f"\n{model.id}, {path.name}: {QUESTION}\n")
    started = time.monotonic()
    first = None
    with (
        client,
        client.chat.completions.with_streaming_response.create(
            model=model.id,
            messages=[{"role": "user", "content": content(path)}],
            max_tokens=24,
            temperature=0,
            stream=True,
        ) as reply,
    ):
        print("  > ", end="")
        for event in reply.parse():
            first = first or time.monotonic() - started
            for choice in event.choices:
                print(printable(choice.delta.content or ""), end="", flush=True)
        timing = reply.headers["server-timing"]
    print("\n\n  The model is a tiny one with random weights: the words mean nothing, the path is")
    print("  the real one.\n")
    show_times(timing, first or 0.0, time.monotonic() - started)
    show_store(stack)


def content(path: Path) -> list[openai.types.chat.ChatCompletionContentPartParam]:
    media_type = mimetypes.guess_type(path.name)[0] or "image/jpeg"
    data = base64.b64encode(path.read_bytes()).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)


def show_times(timing: str, first_s: float, total_s: float) -> None:
    """Print the time of each stage, as the proxy reports it in `Server-Timing`."""
    print("Where the time went:")
    for entry in timing.split(", "):
        stage, _, milliseconds = entry.partition(";dur=")
        what = " (until its first byte)" if stage == "decode" else ""
        print(f"  {stage:12} {float(milliseconds) / 1000:7.3f} s{what}")
    print(f"  first token  {first_s:7.3f} s\n  whole answer {total_s:7.3f} s")


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
    print(f"\nThe stack stays up until Ctrl-C. Try:\n\n  curl {stack.url}/health\n")
    print(
        f"  curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )
    with suppress(KeyboardInterrupt):
        stack.watch()


if __name__ == "__main__":
    main()
