"""Time to the first token of a picture that is new, and of one that was seen before.

    .venv/bin/python scripts/bench_first_token.py [--topology 1e1p1d] [--ec-store redis://…]

Starts a real stack on the CPU with the tiny model. Pictures are of noise, 1 megapixel; each is
asked about twice, under another cache_salt, so that no prefix cache helps.
"""

import argparse
import base64
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
from PIL import Image

from epd.fleet import Stack, Topology

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".run" / "models" / "tiny-qwen2.5-vl"
SIDE = 1000


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="1e1pd")
    parser.add_argument("--ec-store", default=None)
    parser.add_argument("--pictures", type=int, default=15)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(
            MODEL,
            Topology.parse(args.topology),
            Path(folder),
            local_media=ROOT / "examples" / "media",
            store=args.ec_store,
            report=lambda _: None,
        ) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(3):
            _first_token_s(client, _picture())
        times = []
        for _ in range(args.pictures):
            picture = _picture()
            times.append((_first_token_s(client, picture), _first_token_s(client, picture)))
    new, seen = (statistics.median(column) for column in zip(*times, strict=True))
    print("| stack | new picture | seen before | ratio |\n| --- | --- | --- | --- |")
    print(f"| {args.topology} | {new * 1000:.0f} ms | {seen * 1000:.0f} ms | {seen / new:.2f} |")


def _picture() -> Mapping[str, Any]:
    buffer = BytesIO()
    noise = Image.frombytes("RGB", (SIDE, SIDE), secrets.token_bytes(SIDE * SIDE * 3))
    noise.save(buffer, "JPEG", quality=50)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _first_token_s(client: openai.OpenAI, picture: Mapping[str, Any]) -> float:
    messages: Any = [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    ]
    started = time.perf_counter()
    with client.chat.completions.create(
        model=MODEL.name,
        messages=messages,
        max_tokens=2,
        stream=True,
        extra_body={"cache_salt": secrets.token_hex(8)},
    ) as events:
        next(event for event in events if event.choices)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
