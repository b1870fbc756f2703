"""Faults of the store: requests with media are answered, and no engine ends."""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import numpy as np
import pytest

from ec_store import Entry, EntryKey, Store, StoreUnavailable, open_store
from ec_store.concurrency import OPEN_S
from ec_store.disk.opening import LOOK_EVERY_S
from epd.encoder_cache.claims import WRITTEN_WITHIN_S
from epd.tools.up.engine import Engine
from tests.e2e.asking import PICTURES, ask, picture, unseen
from tests.e2e.served import Served, metric, stored
from tests.requests import Part, text
from tests.small_disk import SmallDisk, small_disk
from tests.support.redis_server import wait_until_whole

GRID = {"image_grid_thw": [1, 28, 42]}
DROPS = "vllm:ec_store_drops_total"

TOKENS = 16
KEY_COMMANDS = ("get", "getrange", "pexpire", "set")
"""Redis commands of looking up an entry and writing it."""

WAIT_S = 120.0
"""Timeout of waits."""


def by_key(identifier: str, grid: Mapping[str, Any] = GRID) -> Part:
    return {"type": "image_embeds", "image_embeds": grid, "uuid": identifier}


def to_engine(engine: Engine, *parts: Part, tokens: int, **more: Any) -> httpx.Response:
    """Send a request directly to an engine."""
    body: dict[str, Any] = {
        "model": engine.settings.served_name,
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": tokens,
        "temperature": 0,
        "cache_salt": secrets.token_hex(8),
        **more,
    }
    return httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=180)


def to_decode(stack: Served, *parts: Part, promised: str | None = None) -> httpx.Response:
    """Send a request to the consumer of encoder outputs, PD or P, as a proxy does."""
    params = {} if promised is None else {"ec_transfer_params": {promised: {"metadata": GRID}}}
    return to_engine(stack.consumers[0], *parts, tokens=TOKENS, **params)


def encode(stack: Served, item: Part) -> dict[str, Any]:
    """Return the encode engine's `ec_transfer_params` for an item under an unused key."""
    reply = to_engine(stack.encode, {**item, "uuid": uuid4().hex}, tokens=1)
    assert reply.status_code == 200
    return reply.json()["ec_transfer_params"] or {}


def key_of(reported: dict[str, Any]) -> EntryKey:
    """Return the key of the only item in the reply."""
    [(identifier, said)] = reported.items()
    return EntryKey(said["namespace"], identifier)


def encoded(stack: Served, store: Store, item: Part) -> tuple[EntryKey, Entry]:
    """Encode an item under an unused key; return its key and its entry."""
    reported: dict[str, Any] = {}

    def named() -> bool:
        """Encode; return whether the engine reports a key, which it does not while bypassing."""
        reported.update(encode(stack, item))
        return bool(reported)

    until(named)
    key = key_of(reported)
    until(lambda: store.lookup([key])[0] is not None)
    entry = store.get(key)
    assert entry is not None
    return key, entry


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def settle(figures: Callable[[], object]) -> None:
    """Wait until the values have not changed for longer than claims are held after an encode."""
    deadline = time.monotonic() + WAIT_S
    last, since = figures(), time.monotonic()
    while time.monotonic() - since < 2 * WRITTEN_WITHIN_S:
        assert time.monotonic() < deadline, "the values keep changing"
        time.sleep(0.1)
        if (now := figures()) != last:
            last, since = now, time.monotonic()


def content(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    words: str = reply.json()["choices"][0]["message"]["content"]
    return words


def raw(*items: Part) -> list[Part]:
    """Return the media under unused keys, so that the consumer encodes them."""
    return [{**item, "uuid": uuid4().hex} for item in items]


def check_serving(stack: Served) -> None:
    """Check that the engines answer requests about a known picture and a new one."""
    stack.stack.check_alive()
    for part in (picture("cat.jpg"), unseen(stack)):
        assert len(ask(stack.client, stack.model, part, text("still there?"))) == 16
    assert to_decode(stack, text("hi")).status_code == 200


@pytest.mark.fault(21)
def test_metadata_of_a_missing_entry_fails_only_its_request(stack: Served) -> None:
    before = metric(stack.consumers[0], "vllm:ec_store_failed_requests_total")
    for key in ("never-written", "../../etc/passwd", "/abs", "x" * 300):
        assert to_decode(stack, by_key(key), text()).status_code == 500

    check_serving(stack)
    failed = metric(stack.consumers[0], "vllm:ec_store_failed_requests_total") - before
    assert failed == 4


def test_a_promised_entry_that_never_arrives_fails_only_its_request(stack: Served) -> None:
    assert to_decode(stack, by_key("promised"), text(), promised="promised").status_code == 500

    check_serving(stack)


@pytest.mark.fault(21)
def test_an_entry_that_was_deleted_after_it_was_encoded(stack: Served) -> None:
    ask(stack.client, stack.model, picture("astronaut.jpg"), text("known"))
    known = stored(stack)
    with open_store(stack.stack.store) as store:
        keys = [info.key for info in known.values()]
        assert store.delete(keys) == len(keys)

    check_serving(stack)


@pytest.mark.fault(20)
def test_an_entry_with_another_number_of_rows_is_a_miss(stack: Served) -> None:
    ask(stack.client, stack.model, picture("coffee.jpg"), text("shape"))
    identifier, info = next(iter(stored(stack).items()))
    wrong = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}}
    assert info.shape[0] != 4
    assert to_decode(stack, {**wrong, "uuid": identifier}, text()).status_code == 500

    check_serving(stack)


Alter = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def spoiled(value: float) -> Alter:
    """Return a function that replaces one value in the middle."""

    def alter(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows[rows.shape[0] // 2, 3] = value
        return rows

    return alter


UNFIT: Mapping[str, tuple[str, Alter]] = {
    "wider": ("misfits", lambda rows: np.pad(rows, ((0, 0), (0, 8)))),
    "narrower": ("misfits", lambda rows: rows[:, :-8]),
    "twice-as-wide": ("misfits", lambda rows: np.hstack([rows, rows])),
    "longer": ("misfits", lambda rows: np.vstack([rows, rows[:1]])),
    "shorter": ("misfits", lambda rows: rows[1:]),
    "dtype": ("misfits", lambda rows: rows.astype(np.float16)),
    "flat": ("misfits", lambda rows: rows.reshape(-1)),
    "deep": ("misfits", lambda rows: rows[None]),
    "nan": ("nonfinite", spoiled(np.nan)),
    "infinite": ("nonfinite", spoiled(-np.inf)),
}
"""Alterations of an entry, and the counter that each increases."""


def replace(store: Store, key: EntryKey, entry: Entry, alter: Alter) -> None:
    """Replace an entry by an altered one, as an engine of another release could have written it."""
    assert entry.dtype == "F32"
    rows = np.frombuffer(entry.data, np.float32).reshape(entry.shape).copy()
    altered = np.ascontiguousarray(alter(rows))
    dtype = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}[altered.dtype]
    data = memoryview(altered.tobytes())
    assert store.delete([key]) == 1
    assert store.put(key, Entry(data, dtype, altered.shape, entry.modality, entry.metadata))


@pytest.mark.fault(20)
@pytest.mark.fault(69)
@pytest.mark.parametrize(("counter", "alter"), UNFIT.values(), ids=UNFIT)
def test_entries_that_do_not_fit_end_no_engine(stack: Served, counter: str, alter: Alter) -> None:
    """With media the consumer encodes the item itself; with metadata alone the request fails."""
    item = picture("cat.jpg")
    expected = content(to_decode(stack, *raw(item), text()))
    assert expected != content(to_decode(stack, *raw(picture("coffee.jpg")), text()))
    counted = f"vllm:ec_store_{counter}_total"
    before = metric(stack.consumers[0], counted)
    with open_store(stack.stack.store) as store:
        key, entry = encoded(stack, store, item)
        assert content(to_decode(stack, by_key(key.identifier, entry.metadata), text())) == expected
        key, entry = encoded(stack, store, item)
        replace(store, key, entry, alter)
        by_metadata = to_decode(stack, by_key(key.identifier, entry.metadata), text())
        with_media = to_decode(stack, {**item, "uuid": key.identifier}, text())

    assert by_metadata.status_code == 500
    assert content(with_media) == expected
    assert metric(stack.consumers[0], counted) == before + 2
    check_serving(stack)


@pytest.mark.fault(69)
@pytest.mark.parametrize("kind", ["wider", "narrower", "longer", "nan"])
def test_proxy_answers_where_the_entry_it_finds_does_not_fit(stack: Served, kind: str) -> None:
    """The consumer fails the request with metadata alone, and the proxy retries with the media."""
    item = unseen(stack)
    expected = ask(stack.baseline, stack.model, item, text("fit"))
    body = {"model": stack.model, "content": [item]}
    pushed = httpx.post(f"{stack.stack.url}/v1/media", json=body, timeout=180)
    info = stored(stack)[pushed.json()["data"][0]["key"]]
    counter, alter = UNFIT[kind]
    counted = f"vllm:ec_store_{counter}_total"
    before = metric(stack.consumers[0], counted)
    with open_store(stack.stack.store) as store:
        entry = store.get(info.key)
        assert entry is not None
        replace(store, info.key, entry, alter)

    assert ask(stack.client, stack.model, item, text("fit")) == expected
    assert metric(stack.consumers[0], counted) > before
    check_serving(stack)


@pytest.mark.fault(74)
def test_engine_answers_transfer_parameters_of_any_type(stack: Served) -> None:
    """A client may send them to an engine directly; the proxy removes them."""
    expected = content(to_decode(stack, *raw(picture("cat.jpg")), text()))
    for params in (1, 0.5, "a", ["a", 1]):
        reply = to_engine(
            stack.consumers[0],
            *raw(picture("cat.jpg")),
            text(),
            tokens=TOKENS,
            vllm_xargs={"ec_transfer_params": params},
        )
        assert content(reply) == expected
    check_serving(stack)


def store_path(stack: Served) -> Path:
    return Path(urlsplit(stack.stack.store).path)


@pytest.mark.fault(20)
def test_corrupt_entries_are_misses(stack: Served) -> None:
    ask(stack.client, stack.model, picture("cat.jpg"), text("corrupt"))
    identifiers = list(stored(stack))
    for path in (store_path(stack) / "entries").rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0xFF
            path.chmod(0o640)
            path.write_bytes(content)
    with open_store(stack.stack.store) as store:
        [namespace] = set(store.namespaces().values())
        assert identifiers
        assert not any(store.get(EntryKey(namespace, one)) for one in identifiers)

    check_serving(stack)


def test_the_store_is_removed_while_serving(stack: Served) -> None:
    shutil.rmtree(store_path(stack))

    check_serving(stack)


def test_prefill_encodes_a_picture_while_the_store_is_unreachable(
    stack: Served,
) -> None:
    """A file replaces the directory, so that nothing can be read or written."""
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


def test_requests_do_not_wait_for_one_that_waits_for_its_entry(stack: Served) -> None:
    """Other requests run while one waits for a promised entry."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(to_decode, stack, by_key("late"), text(), promised="late")
        # The first one may have run before it; the second one cannot have waited for it.
        others = [to_decode(stack, text(f"hi {number}")) for number in range(2)]
        still = not waiting.done()
        assert waiting.result().status_code == 500

    assert [reply.status_code for reply in others] == [200] * 2
    assert still


@pytest.mark.fault(16)
def test_redis_is_paused_while_serving(stack: Served) -> None:
    [server] = stack.redis
    with server.paused():
        reply = to_decode(stack, {**unseen(stack), "uuid": "raw-while-paused"}, text())
        assert reply.status_code == 200
        assert to_decode(stack, by_key("gone-while-paused"), text()).status_code == 500
        stack.stack.check_alive()

    check_serving_again(stack)


@pytest.mark.fault(16)
def test_requests_survive_a_stop_and_a_restart_of_redis(stack: Served) -> None:
    [server] = stack.redis
    server.kill()
    reply = to_decode(stack, {**unseen(stack), "uuid": "raw-while-stopped"}, text())
    assert reply.status_code == 200
    assert to_decode(stack, by_key("gone-while-stopped"), text()).status_code == 500
    stack.stack.check_alive()
    server.start()

    check_serving_again(stack)


def check_serving_again(stack: Served) -> None:
    """Wait until the engines use the store again, and run `check_serving`."""
    time.sleep(OPEN_S + 1)
    check_serving(stack)


@pytest.fixture
def disk(stack: Served, tmp_path: Path) -> Iterator[SmallDisk]:
    """Move the stack's store to a small disk for the duration of the test."""
    path = store_path(stack)
    with small_disk(tmp_path / "disk", "8m") as disk:
        (disk.path / "store").mkdir()
        shutil.rmtree(path, ignore_errors=True)
        path.symlink_to(disk.path / "store")
        wait_until_looked()
        try:
            yield disk
        finally:
            disk.remount("rw")
            path.unlink()
    wait_until_looked()


def wait_until_looked() -> None:
    """Wait until every engine checks at its next use where the path of the store leads."""
    time.sleep(LOOK_EVERY_S + 0.1)


def check_answered_without_writing(stack: Served, store: Store, spare: Entry) -> None:
    """Check that consumers encode media themselves and answer while nothing can be written."""
    drops = metric(stack.encode, DROPS)
    lost = EntryKey("tests", uuid4().hex)
    with pytest.raises(StoreUnavailable):
        store.put(lost, spare)
    expected = content(to_decode(stack, *raw(picture("cat.jpg")), text()))
    for _ in range(5):
        encode(stack, picture("cat.jpg"))
    # An output that is not written is not reported.
    until(lambda: encode(stack, picture("cat.jpg")) == {})
    reply = to_decode(stack, {**picture("cat.jpg"), "uuid": uuid4().hex}, text())
    assert content(reply) == expected
    assert to_decode(stack, by_key(lost.identifier), text()).status_code == 500
    assert metric(stack.encode, DROPS) > drops
    stack.stack.check_alive()


@pytest.mark.fault(17)
def test_the_store_is_made_read_only_while_serving(stack: Served, disk: SmallDisk) -> None:
    with open_store(stack.stack.store) as store:
        key, entry = encoded(stack, store, picture("cat.jpg"))
        expected = content(to_decode(stack, *raw(picture("cat.jpg")), text()))
        disk.remount("ro")
        check_answered_without_writing(stack, store, entry)
        assert content(to_decode(stack, by_key(key.identifier), text())) == expected
        disk.remount("rw")
        encoded(stack, store, picture("coffee.jpg"))

    check_serving(stack)


@pytest.mark.fault(17)
def test_the_store_is_full_while_serving(stack: Served, disk: SmallDisk) -> None:
    with open_store(stack.stack.store) as store:
        key, entry = encoded(stack, store, picture("cat.jpg"))
        # Otherwise the store would evict this entry to write another.
        assert store.delete([key]) == 1
        with disk.filled():
            check_answered_without_writing(stack, store, entry)
        encoded(stack, store, picture("coffee.jpg"))

    check_serving(stack)


@pytest.mark.parametrize("media", [False, True], ids=["by-key", "media"])
def test_an_entry_is_deleted_while_its_request_waits_for_another(
    stack: Served, media: bool
) -> None:
    """The entry was fetched before, and stays in the engine's memory until the request ends."""
    fetched = "vllm:ec_store_hits_total"
    consumer = stack.consumers[0]
    items = picture("cat.jpg"), picture("coffee.jpg")
    expected = content(to_decode(stack, *raw(*items), text()))
    with open_store(stack.stack.store) as store, ThreadPoolExecutor(1) as pool:
        first, _ = encoded(stack, store, items[0])
        second, entry = encoded(stack, store, items[1])
        assert store.delete([second]) == 1
        before = metric(consumer, fetched)
        parts = [by_key(first.identifier), by_key(second.identifier, entry.metadata)]
        if media:
            uuids = first.identifier, second.identifier
            parts = [{**item, "uuid": uuid} for item, uuid in zip(items, uuids, strict=True)]
        waiting = pool.submit(to_decode, stack, *parts, text(), promised=second.identifier)
        until(lambda: metric(consumer, fetched) == before + 1)
        assert store.delete([first]) == 1
        assert not waiting.done()
        store.put(second, entry)

        assert content(waiting.result()) == expected


@pytest.mark.fault(21)
def test_media_are_encoded_again_after_their_entry_was_deleted(stack: Served) -> None:
    expected = content(to_decode(stack, *raw(picture("cat.jpg")), text()))
    with open_store(stack.stack.store) as store:
        key, _ = encoded(stack, store, picture("cat.jpg"))
        assert store.delete([key]) == 1
    part = {**picture("cat.jpg"), "uuid": key.identifier}

    assert content(to_decode(stack, part, text())) == expected


@contextmanager
def coming_and_going(store: Store, keys: Sequence[EntryKey], entry: Entry) -> Iterator[None]:
    """Write and delete all keys in a thread, as fast as possible."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for key in keys:
                store.put(key, entry)
            store.delete(keys)

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        try:
            yield
        finally:
            stop.set()
        churning.result()


def test_entries_come_and_go_while_requests_want_them(stack: Served) -> None:
    exceptions = "vllm:ec_store_exceptions_total"
    before = metric(stack.consumers[0], exceptions)
    item = picture("cat.jpg")
    expected = content(to_decode(stack, *raw(item), text()))
    with ExitStack() as open_ones:
        store = open_ones.enter_context(open_store(stack.stack.store))
        key, entry = encoded(stack, store, item)
        keys = [EntryKey(key.namespace, f"{key.identifier}-{n}") for n in range(32)]
        names = [key.identifier for key in keys]
        open_ones.enter_context(coming_and_going(store, keys, entry))
        pool = open_ones.enter_context(ThreadPoolExecutor(8))
        replies = {
            name: pool.submit(
                to_decode,
                stack,
                {**item, "uuid": name} if place % 2 else by_key(name),
                text(),
                promised=name if place % 4 > 1 else None,
            )
            for place, name in enumerate(names)
        }
        with_media = [content(replies[name].result()) for name in names[1::2]]
        without = [replies[name].result() for name in names[::2]]

    assert with_media == [expected] * 16
    # Promised entries are looked up until they are found: some were.
    served = [reply for reply in without if reply.status_code != 500]
    assert {content(reply) for reply in served} == {expected}
    check_serving(stack)
    assert metric(stack.consumers[0], exceptions) == before


@pytest.mark.fault(16)
def test_requests_survive_a_stop_and_a_restart_of_a_redis_cluster(stack: Served) -> None:
    for name in PICTURES:
        ask(stack.client, stack.model, picture(name), text("keep it"))
    assert len(stored(stack)) >= len(PICTURES)
    expected = content(to_decode(stack, *raw(picture("cat.jpg")), text()))
    for count in (1, len(stack.redis)):
        for server in stack.redis[:count]:
            server.kill()
        encode(stack, picture("cat.jpg"))
        part = {**picture("cat.jpg"), "uuid": uuid4().hex}
        assert content(to_decode(stack, part, text())) == expected
    assert to_decode(stack, by_key("gone-while-stopped"), text()).status_code == 500
    stack.stack.check_alive()
    for server in stack.redis:
        server.start()
    wait_until_whole(stack.redis)

    check_serving_again(stack)
    assert stored(stack)


def test_one_rank_of_the_encode_engine_writes(stack: Served) -> None:
    """All ranks together need as many commands as one process to look up and write entries."""
    assert stack.spec.ranks == 2
    count = 5

    def commands() -> int:
        return sum(server.calls(name) for server in stack.redis for name in KEY_COMMANDS)

    def entries() -> int:
        return sum(server.command("DBSIZE") for server in stack.redis)

    with open_store(stack.stack.store) as store:
        # This entry is written after all earlier ones; their claims are released later.
        encoded(stack, store, unseen(stack))
        settle(lambda: (commands(), entries()))
        before, held = commands(), entries()
        keys = [key_of(encode(stack, unseen(stack))) for _ in range(count)]
        until(lambda: entries() >= held + count)
        taken = commands() - before
        entry = store.get(keys[0])
        assert entry is not None
        before = commands()
        for key in keys:
            copy = EntryKey(key.namespace, f"{key.identifier}-copy")
            assert store.lookup([copy]) == [None]
            assert store.put(copy, entry)

    assert taken == commands() - before
