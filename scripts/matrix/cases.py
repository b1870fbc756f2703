"""Cases of the matrix: the requests that every model gets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

from scripts.matrix.media import LARGE, Part, frames, picture, sound, text, video
from scripts.matrix.subjects import PICTURE, SOUND, VIDEO

AT_ONCE = 8
DISTINCT = 4
"""Number of items of a modality that a model must tell apart."""
RATES = (1, 2, 8)
"""Frame rates that clients declare for their JPEG frames, in frames per second."""
KINDS: Mapping[str, Callable[[int], Part]] = MappingProxyType(
    {PICTURE: picture, VIDEO: video, SOUND: sound}
)


@dataclass(frozen=True, slots=True)
class Request:
    """Chat request.

    Attributes:
        messages: messages of the conversation.
        stream: whether the answer is streamed.
        seen: modality of its items, if earlier requests had all of them: they must be hits.
        options: additional fields of the body.
    """

    messages: Sequence[Mapping[str, Any]]
    stream: bool = False
    seen: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> list[Part]:
        parts = [part for message in self.messages for part in contents(message)]
        return [part for part in parts if part["type"] != "text"]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that test one behaviour.

    Attributes:
        name: name of the behaviour.
        requests: requests in their order.
        at_once: whether they are sent concurrently.
    """

    name: str
    requests: Sequence[Request]
    at_once: bool = False


def contents(message: Mapping[str, Any]) -> list[Part]:
    content = message["content"]
    return [text(content)] if isinstance(content, str) else list(content)


def ask(*parts: Part, **more: Any) -> Request:
    return Request([user(*parts)], **more)


def user(*parts: Part) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def distinct(modality: str) -> list[Request]:
    """Return questions about different items.

    A model that tells them apart answers them differently.
    """
    return [ask(KINDS[modality](number), text()) for number in range(DISTINCT)]


def cases(modalities: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of a model. No two cases share an item."""
    numbers = count(DISTINCT)
    yield Case("text only", [ask(text("say something"))])
    for modality in modalities:
        yield from of_one(modality, numbers)
    if VIDEO in modalities:
        yield from jpeg_frames(numbers)
    mixtures = [(PICTURE, VIDEO), (SOUND, PICTURE), (SOUND, PICTURE, VIDEO)]
    for mixture in mixtures:
        if set(mixture) <= set(modalities):
            items = [KINDS[modality](next(numbers)) for modality in mixture]
            yield Case(" and ".join(mixture), [ask(*items, text())] * 2)


def of_one(modality: str, numbers: Iterator[int]) -> Iterator[Case]:
    def new() -> Part:
        return KINDS[modality](next(numbers))

    first = new()
    yield Case(modality, [ask(first, text())])
    yield Case(f"{modality} again", [ask(first, text("and?"), seen=modality)])
    first_item, other = new(), new()
    yield Case(
        f"two {modality}s: A B, B A",
        [ask(first_item, other, text()), ask(other, first_item, text())],
    )
    same = new()
    yield Case(f"the same {modality} twice", [ask(same, same, text())])
    yield Case(f"{modality} streamed", [ask(new(), text(), stream=True)])
    if modality == VIDEO:
        return
    large = picture(next(numbers), LARGE) if modality == PICTURE else sound(next(numbers), 3.0)
    yield Case(f"large and small {modality}", [ask(large, text()), ask(large, new(), text())])
    yield Case(
        f"{modality}s between texts",
        [ask(text("this"), new(), text("or that"), new(), text("which?"))],
    )
    yield turns(modality, new(), new())
    yield Case(
        f"eight {modality}s at once",
        [ask(new(), text(f"number {number}")) for number in range(AT_ONCE)],
        at_once=True,
    )


def turns(modality: str, first: Part, second: Part) -> Case:
    """Return three turns of a conversation; the last one has no item of its own."""
    messages = [
        user(first, text("what?")),
        {"role": "assistant", "content": "this and that"},
        user(second, text("and this?")),
        {"role": "assistant", "content": "something else"},
        user(text("which was the first?")),
    ]
    return Case(f"{modality}s, three turns", [Request(messages[:end]) for end in (1, 3, 5)])


def jpeg_frames(numbers: Iterator[int]) -> Iterator[Case]:
    """Yield the same frames at several rates. No rate may get another's encoder output."""
    item = frames(next(numbers))
    rates = [
        ask(item, text(), options={"media_io_kwargs": {"video": {"fps": rate}}}) for rate in RATES
    ]
    yield Case("JPEG frames at 1, 2 and 8 a second", rates)
    yield Case("JPEG frames again, at 2 a second", [rates[1]])
