"""Serve a picture through a real EPD stack on this machine's CPU, and show what happened.

Run by `demo.sh`, which sets up what it needs.
"""

import argparse
import base64
import json
import mimetypes
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

from ec_store import open_store
from epd.fleet import ProcessDied, Stack, Topology

ROOT = Path(__file__).resolve().parent.parent
MEDIA = ROOT / "examples" / "media"
RUN = ROOT / ".run"
MODEL = "tiny-qwen2.5-vl"
QUESTION = "What is in this picture?"


def main() -> None:
    """Start the stack, ask, show, stop."""
    args = arguments()
    # Progress is for whoever watches, through a pipe as well.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Whatever ends this process must end the engines too: let the contexts be left.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    # A shell starts what it runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    models = RUN / "models"
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", models], check=True)
    directory = Path(tempfile.mkdtemp(prefix="epd-demo-"))
    stack = Stack(models / MODEL, args.topology, directory, local_media=MEDIA, store=args.ec_store)
    try:
        with stack:
            answer(stack, args.picture)
            if args.keep:
                keep(stack, args.picture)
    except (ProcessDied, TimeoutError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped")
    print("\nEverything is stopped.")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--topology",
        type=topology,
        default="1e1pd",
        help="1e1pd (default), 1e1p1d with NIXL between prefill and decode, 2e1pd, ...",
    )
    parser.add_argument(
        "--picture", type=picture, default=MEDIA / "cat.jpg", help="the picture to ask about"
    )
    parser.add_argument(
        "--ec-store", metavar="URL", help="redis://… or file:///path; by default a new directory"
    )
    parser.add_argument("--keep", action="store_true", help="leave the stack up until Ctrl-C")
    return parser.parse_args()


def topology(name: str) -> Topology:
    """A topology, or argparse's error."""
    try:
        return Topology.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def picture(name: str) -> Path:
    """A picture's path, or argparse's error."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is not a file")
    return path


def answer(stack: Stack, path: Path) -> None:
    """Stream one answer through the official client, then show where it came from."""
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
    """The content parts of the question."""
    media_type = mimetypes.guess_type(path.name)[0] or "image/jpeg"
    data = base64.b64encode(path.read_bytes()).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]


def printable(text: str) -> str:
    """The text with what a terminal would act on replaced."""
    return "".join(character if character.isprintable() else "·" for character in text)


def show_times(timing: str, first_s: float, total_s: float) -> None:
    """What each stage took, as the proxy reports it in `Server-Timing`."""
    print("Where the time went:")
    for entry in timing.split(", "):
        stage, _, milliseconds = entry.partition(";dur=")
        what = " (until its first byte)" if stage == "decode" else ""
        print(f"  {stage:12} {float(milliseconds) / 1000:7.3f} s{what}")
    print(f"  first token  {first_s:7.3f} s\n  whole answer {total_s:7.3f} s")


def show_store(stack: Stack) -> None:
    """What the store holds, and where."""
    print(f"\nEncoder output in {stack.store}, where prefill found it:")
    with open_store(stack.store) as store:
        for row in store.ls():
            if row.info is not None:
                shape = " x ".join(map(str, row.info.shape))
                print(
                    f"  {row.digest}\n    {row.info.modality}, {row.info.dtype}, {shape}, ", end=""
                )
                print(f"{row.size_bytes:,} bytes, {dict(row.info.metadata)}")
                print(f"    namespace {row.info.key.namespace}")


def keep(stack: Stack, path: Path) -> None:
    """Serve until Ctrl-C, or until processes have died without which there are no answers."""
    url = {"url": (path if path.parent == MEDIA else MEDIA / "cat.jpg").resolve().as_uri()}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 24})
    print(f"\nThe stack stays up until Ctrl-C. Try:\n\n  curl {stack.url}/health\n")
    print(
        f"  curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )
    stack.watch()


if __name__ == "__main__":
    main()
