"""A picture seen before costs neither an encode nor its upload, and the answer stays the same."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ec_store import open_store
from tests.e2e.conftest import Served, metric, stored
from tests.e2e.stacks import ON_CLUSTER, ON_DISK, ON_REDIS, on
from tests.e2e.test_answers import (
    PREPROCESSED,
    ask,
    check_equal,
    on_vision,
    picture,
    unseen,
)
from tests.requests import Part, text

on_stores = on(ON_DISK, ON_REDIS, ON_CLUSTER)

ENCODED = "vllm:request_success_total"


def items_of(stack: Served, *parts: Part, **more: Any) -> dict[str, int]:
    """What the proxy says of where the items came from."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    reply = stack.client.chat.completions.with_raw_response.create(
        model=stack.model, messages=messages, max_tokens=1, extra_body=more
    )
    pairs = (pair.split("=") for pair in reply.headers["x-epd-items"].split(","))
    return {name: int(count) for name, count in pairs if count != "0"}


@contextmanager
def preprocessed(stack: Served) -> Iterator[list[float]]:
    """How many items each engine has preprocessed, the encode engine first, once it is left."""
    engines = [stack.encode, *stack.consumers]
    before = [metric(engine, PREPROCESSED) for engine in engines]
    moved: list[float] = []
    yield moved
    after = [metric(engine, PREPROCESSED) for engine in engines]
    moved += [new - old for new, old in zip(after, before, strict=True)]


def test_an_item_seen_before_is_neither_encoded_nor_preprocessed_again(stack: Served) -> None:
    item = unseen(stack)
    with preprocessed(stack) as moved:
        assert items_of(stack, item, text()) == {"encoded": 1}
    assert moved == [1] + [0] * len(stack.consumers)

    with preprocessed(stack) as moved:
        assert items_of(stack, item, text("again")) == {"hit": 1}
        assert items_of(stack, item, unseen(stack), text("more")) == {"hit": 1, "encoded": 1}
    assert moved == [1] + [0] * len(stack.consumers)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_hits_are_those_of_the_engine_alone(stack: Served, stream: bool) -> None:
    item, other = unseen(stack), unseen(stack)
    first = check_equal(stack, item, text("what?"), stream=stream)
    assert check_equal(stack, item, text("what?"), stream=stream) == first
    mixed = check_equal(stack, other, item, text("which?"), stream=stream)
    assert check_equal(stack, other, item, text("which?"), stream=stream) == mixed


@on_vision
def test_a_picture_and_a_video(stack: Served) -> None:
    parts = picture("cat.jpg"), picture("ball.gif", "video_url"), text("both")
    first = check_equal(stack, *parts, stream=False)
    assert check_equal(stack, *parts, stream=False) == first


@on_vision
def test_processor_kwargs_are_other_entries_and_are_found_again(stack: Served) -> None:
    item, words = unseen(stack), text("how large?")
    kwargs = {"mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112}}
    plain = check_equal(stack, item, words, stream=False)
    small = check_equal(stack, item, words, stream=False, **kwargs)

    assert plain != small
    assert check_equal(stack, item, words, stream=False, **kwargs) == small
    assert items_of(stack, item, words, **kwargs) == {"hit": 1}
    assert check_equal(stack, item, words, stream=False) == plain


@on_stores
def test_a_conversation_of_ten_turns_encodes_each_picture_once(stack: Served) -> None:
    pictures = [unseen(stack) for _ in range(3)]
    messages: list[Any] = []
    before = metric(stack.encode, ENCODED)
    for turn in range(10):
        new = [pictures[turn // 4]] if turn % 4 == 0 else []
        messages.append({"role": "user", "content": [text(f"turn {turn}"), *new]})
        reply = stack.client.chat.completions.create(
            model=stack.model, messages=messages, max_tokens=4
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    assert metric(stack.encode, ENCODED) - before == 3


@on_stores
def test_entries_that_go_between_look_up_and_load_are_not_missed(stack: Served) -> None:
    """Row 21, without a moment that a test would choose: they go all the time."""
    item, words = unseen(stack), text("still?")
    expected = check_equal(stack, item, words, stream=False)
    stop = threading.Event()

    def delete() -> None:
        with open_store(stack.stack.store) as store:
            while not stop.is_set():
                store.delete([info.key for info in stored(stack).values()])

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        answers = [ask(stack.client, stack.model, item, words) for _ in range(20)]
    finally:
        stop.set()
        deleting.join()

    assert answers == [expected] * 20
    stack.stack.check_alive()
