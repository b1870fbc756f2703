"""Whatever happens to the store: requests with media are answered, and no engine ends."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ec_store import EntryKey, open_store
from ec_store.breaker import OPEN_S
from tests.e2e.conftest import ON_DISK, ON_REDIS, Served, metric, stored
from tests.e2e.test_answers import ask, picture, unseen
from tests.requests import Part, text

on_disk = pytest.mark.parametrize("stack", [ON_DISK], indirect=True, ids="-".join)
on_redis = pytest.mark.parametrize("stack", [ON_REDIS], indirect=True, ids="-".join)
on_both = pytest.mark.parametrize("stack", [ON_DISK, ON_REDIS], indirect=True, ids="-".join)

GRID = {"image_grid_thw": [1, 28, 42]}


def by_key(identifier: str) -> Part:
    return {"type": "image_embeds", "image_embeds": GRID, "uuid": identifier}


def to_decode(stack: Served, *parts: Part, promised: str | None = None) -> httpx.Response:
    """Ask the PD engine itself, as a proxy would."""
    body: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 4,
        "temperature": 0,
    }
    if promised is not None:
        body["ec_transfer_params"] = {promised: {"metadata": GRID}}
    return httpx.post(f"{stack.consumers[0].url}/v1/chat/completions", json=body, timeout=60)


def check_serving(stack: Served) -> None:
    """The engines live: a picture they know, and one that they do not, are answered."""
    stack.stack.check_alive()
    for part in (picture("cat.jpg"), unseen(stack)):
        assert len(ask(stack.client, stack.model, part, text("still there?"))) == 16
    assert to_decode(stack, text("hi")).status_code == 200


@on_both
def test_metadata_for_an_entry_that_is_not_there_fails_alone(stack: Served) -> None:
    before = metric(stack.consumers[0], "vllm:ec_store_failed_requests_total")
    for key in ("never-written", "../../etc/passwd", "/abs", "x" * 300):
        assert to_decode(stack, by_key(key), text()).status_code == 500

    check_serving(stack)
    failed = metric(stack.consumers[0], "vllm:ec_store_failed_requests_total") - before
    assert failed == 4


@on_both
def test_a_promised_entry_that_never_comes_fails_alone(stack: Served) -> None:
    assert to_decode(stack, by_key("promised"), text(), promised="promised").status_code == 500

    check_serving(stack)


@on_both
def test_an_entry_that_was_deleted_after_it_was_encoded(stack: Served) -> None:
    ask(stack.client, stack.model, picture("astronaut.jpg"), text("known"))
    known = stored(stack)
    with open_store(stack.stack.store) as store:
        keys = [info.key for info in known.values()]
        assert store.delete(keys) == len(keys)

    check_serving(stack)


@on_both
def test_an_entry_of_another_shape_is_a_miss(stack: Served) -> None:
    ask(stack.client, stack.model, picture("coffee.jpg"), text("shape"))
    identifier, info = next(iter(stored(stack).items()))
    wrong = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}}
    assert info.shape[0] != 4
    assert to_decode(stack, {**wrong, "uuid": identifier}, text()).status_code == 500

    check_serving(stack)


def store_path(stack: Served) -> Path:
    return Path(urlsplit(stack.stack.store).path)


@on_disk
def test_corrupt_entries_are_misses(stack: Served) -> None:
    ask(stack.client, stack.model, picture("cat.jpg"), text("corrupt"))
    identifiers = list(stored(stack))
    for path in (store_path(stack) / "entries").rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[-1000] ^= 0xFF
            path.chmod(0o640)
            path.write_bytes(content)
    with open_store(stack.stack.store) as store:
        [namespace] = set(store.namespaces().values())
        assert identifiers
        assert not any(store.get(EntryKey(namespace, one)) for one in identifiers)

    check_serving(stack)


@on_disk
def test_the_store_is_removed_while_serving(stack: Served) -> None:
    shutil.rmtree(store_path(stack))

    check_serving(stack)


@on_disk
def test_a_picture_with_media_is_answered_by_prefill_itself_where_the_store_is_away(
    stack: Served,
) -> None:
    """A file in the place of the directory: nothing can be read or written."""
    path = store_path(stack)
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"")
    try:
        reply = to_decode(stack, {**unseen(stack), "uuid": "raw"}, text())
        assert reply.status_code == 200
        stack.stack.check_alive()
        assert to_decode(stack, by_key("gone"), text()).status_code == 500
    finally:
        path.unlink()

    check_serving(stack)


@on_both
def test_two_requests_do_not_wait_for_one_that_waits_for_its_entry(stack: Served) -> None:
    """While a promised entry is waited for, others run."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(to_decode, stack, by_key("late"), text(), promised="late")
        others = [to_decode(stack, text(f"hi {number}")) for number in range(3)]
        still = not waiting.done()
        assert waiting.result().status_code == 500

    assert [reply.status_code for reply in others] == [200] * 3
    assert still


@on_redis
def test_redis_is_paused_while_serving(stack: Served) -> None:
    assert stack.redis is not None
    with stack.redis.paused():
        reply = to_decode(stack, {**unseen(stack), "uuid": "raw-while-paused"}, text())
        assert reply.status_code == 200
        assert to_decode(stack, by_key("gone-while-paused"), text()).status_code == 500
        stack.stack.check_alive()

    check_serving_again(stack)


@on_redis
def test_redis_is_stopped_while_serving_and_comes_back(stack: Served) -> None:
    assert stack.redis is not None
    stack.redis.kill()
    reply = to_decode(stack, {**unseen(stack), "uuid": "raw-while-stopped"}, text())
    assert reply.status_code == 200
    assert to_decode(stack, by_key("gone-while-stopped"), text()).status_code == 500
    stack.stack.check_alive()
    stack.redis.start()

    check_serving_again(stack)


def check_serving_again(stack: Served) -> None:
    """As `check_serving`, once nobody bypasses the store any more."""
    time.sleep(OPEN_S + 1)
    check_serving(stack)
