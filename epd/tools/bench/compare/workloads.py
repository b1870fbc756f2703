"""Requests of a comparison, made from a seed. No I/O.

Each prompt begins with its own text, so that the prefix cache of an engine saves no picture of
another request; only `screens` extends earlier prompts.
"""

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from PIL import Image

from epd.tools.bench.pictures import rng

Size = tuple[int, int]
Part = Mapping[str, Any]
_WORDS = "the a of and to in is it was for on with he be at by had not are but from or have an they"


@dataclass(frozen=True, slots=True)
class Question:
    """Request of a workload.

    Attributes:
        kind: row that its time to the first token is reported in.
        messages: messages of the conversation so far.
        tokens: length of the answer.
    """

    kind: str
    messages: Sequence[Part]
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations that clients send; a turn is sent when the one before is answered.

    Attributes:
        at_once: number of clients, each with one conversation at a time.
    """

    name: str
    at_once: int
    conversations: Sequence[Sequence[Question]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the workloads.

    Attributes:
        sizes: a usual and a large picture, in pixels.
        window_size: pictures of `window`.
        repeats: requests of each kind, one at a time.
        requests: requests of `pool` in each pass; two thirds of it for `unique` and `text`.
        pool: pictures of `pool`.
        at_once: clients.
        tokens: length of an answer.
        users, turns: conversations of `window`.
        characters, window_tokens: text and answer of each turn of `window`.
        sessions, steps: conversations of `screens`; a step adds a picture.
    """

    sizes: tuple[Size, Size] = ((1280, 720), (2560, 1440))
    window_size: Size = (2400, 1080)
    repeats: int = 5
    requests: int = 96
    pool: int = 48
    at_once: int = 32
    tokens: int = 32
    users: int = 4
    turns: int = 3
    characters: int = 2000
    window_tokens: int = 64
    sessions: int = 8
    steps: int = 5


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "small": Scale(
            sizes=((112, 112), (224, 112)),
            window_size=(224, 112),
            repeats=4,
            requests=12,
            pool=4,
            at_once=4,
            tokens=8,
            users=2,
            characters=200,
            window_tokens=8,
            sessions=2,
            steps=3,
        ),
        "short": Scale(repeats=3, requests=48, pool=24, users=2, sessions=4, steps=4),
        "medium": Scale(),
        "full": Scale(
            repeats=9,
            requests=384,
            pool=200,
            users=30,
            turns=8,
            characters=8000,
            window_tokens=1024,
            sessions=32,
            steps=12,
        ),
    }
)
"""Scales by name. With 20 requests/s of one picture, an arm takes about 25 s with `short` and 60 s
with `medium`. `small` is for a tiny model on a CPU."""


def single(scale: Scale) -> Iterable[Workload]:
    """One request at a time: text, and pictures that are new and then repeated, by their size.

    The shape of SGLang's measurement of hits, four pictures of 2560x1440
    (https://github.com/sgl-project/sglang/pull/28441), with smaller requests added.
    """
    usual, large = scale.sizes
    asked = [_question("text", _text(f"How are you, {n}?"), 16) for n in range(scale.repeats)]
    for size, count in ((usual, 1), (large, 1), (large, 4)):
        shape = f"{count} x {size[0]}x{size[1]}"
        for turn in ("new", "again"):
            for n in range(scale.repeats if count == 1 else scale.repeats - 2):
                pictures = [_picture(f"{shape} {n} {at}", size) for at in range(count)]
                parts = [*_text(f"{turn} {n}, {shape}:"), *pictures]
                asked.append(_question(f"{shape}, {turn}", parts, 16))
    yield Workload("one at a time", 1, [asked])


def unique(scale: Scale) -> Iterable[Workload]:
    """Ask about pictures that are never repeated: what a cache costs and cannot save.

    As `--dataset-name random-mm` of `vllm bench serve` (`vllm/benchmarks/datasets`).
    """
    names = [f"unique {n}" for n in range(scale.requests * 2 // 3)]
    yield _singles("unique", scale, [[_picture(name, scale.sizes[0])] for name in names])


def pool(scale: Scale) -> Iterable[Workload]:
    """Ask about one picture out of a pool, in two passes: the second pass has only known pictures.

    Dynamo's published comparison with an embedding cache has a pool of 200 (its
    docs/benchmarks/qwen3-vl-embedding-cache.mdx), as scale `full`.
    """
    order = rng("order").choices(range(scale.pool), k=scale.requests)
    pictures = [[_picture(f"pool {n}", scale.sizes[0])] for n in order]
    for turn in ("first", "second"):
        yield _singles(f"pool, {turn} pass", scale, pictures)


def window(scale: Scale) -> Iterable[Workload]:
    """Converse with five pictures of 2400x1080 in a turn, four of them of the turn before.

    Dynamo's published comparison on one H100 (its docs/benchmarks/qwen3-6-35b-feature-stack.mdx):
    30 users at once, 8 turns, 8,000 text tokens, 1,024 tokens of answer. That is scale `full`; a
    model with a token per byte has a token per character of text.
    """
    conversations = []
    for user in range(scale.users):
        turns = []
        for turn in range(scale.turns):
            shown = range(turn, turn + 5)
            pictures = [_picture(f"window {user} {at}", scale.window_size) for at in shown]
            text = f"{user} {turn}: {_prose(f'window {user} {turn}', scale.characters)}"
            turns.append(_question("", [*_text(text), *pictures], scale.window_tokens))
        conversations.append(turns)
    yield Workload("window", scale.users, conversations)


def screens(scale: Scale) -> Iterable[Workload]:
    """Sessions of an agent: each step sends all messages again, with one more screenshot.

    The shape of a computer-use session (https://github.com/jundot/omlx/issues/3634). The answers
    in the history are given, so that all arms get the same requests.
    """
    sessions = []
    for session in range(scale.sessions):
        steps: list[Question] = []
        messages: list[Part] = []
        for step in range(scale.steps):
            screen = _picture(f"screens {session} {step}", scale.sizes[0])
            done = _prose(f"screens {session} {step}", 80)
            parts = [*_text(f"Session {session}, step {step}: {done}"), screen]
            messages = [*messages, {"role": "user", "content": parts}]
            steps.append(Question("", messages, scale.tokens))
            messages = [*messages, {"role": "assistant", "content": f"click {step}: {done}"}]
        sessions.append(steps)
    yield Workload("screens", scale.at_once, sessions)


def text(scale: Scale) -> Iterable[Workload]:
    """Ask without media: what the proxy and a divided engine cost those.

    The shape of the random text prompts of `vllm bench serve`.
    """
    prompts = (_prose(f"text {n}", 500) for n in range(scale.requests * 2 // 3))
    yield _singles("text", scale, [_text(prompt) for prompt in prompts])


WORKLOADS: Mapping[str, Callable[[Scale], Iterable[Workload]]] = MappingProxyType(
    {
        "single": single,
        "unique": unique,
        "pool": pool,
        "window": window,
        "screens": screens,
        "text": text,
    }
)


def warm_ups(scale: Scale) -> Sequence[Question]:
    """Return requests with other pictures, of each size: engines compile and connect then."""
    sizes = [*scale.sizes, scale.window_size, scale.sizes[0]]
    return [
        _question("", [*_text(f"warm-up {n}"), _picture(f"warm-up {n}", size)], 16)
        for n, size in enumerate(sizes)
    ]


def _singles(name: str, scale: Scale, contents: Iterable[Sequence[Part]]) -> Workload:
    """Return a workload of conversations with one turn."""
    asked = [
        [_question("", [*_text(f"{name} {n}:"), *parts], scale.tokens)]
        for n, parts in enumerate(contents)
    ]
    return Workload(name, scale.at_once, asked)


def _question(kind: str, content: Sequence[Part], tokens: int) -> Question:
    return Question(kind, [{"role": "user", "content": content}], tokens)


def _text(words: str) -> Sequence[Part]:
    return [{"type": "text", "text": words}]


def _prose(name: str, characters: int) -> str:
    return " ".join(rng(name).choices(_WORDS.split(), k=characters))[:characters]


@cache
def _picture(name: str, size: Size) -> Part:
    """Return a unique JPEG as data URL: patches of colour with soft edges."""
    width, height = size[0] // 16, size[1] // 16
    patches = Image.frombytes("RGB", (width, height), rng(name).randbytes(3 * width * height))
    patches.resize(size, Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
