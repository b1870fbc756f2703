"""Items seen before are neither encoded nor uploaded again, and answers stay the same."""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ec_store import StoreUnavailable, open_store
from epd.tenants import key_line
from tests.e2e.asking import PREPROCESSED, ask, check_equal, picture, unseen
from tests.e2e.proxies import another_proxy
from tests.e2e.served import Served, metric, stored
from tests.paths import MEDIA
from tests.requests import Part, image, text


def items_of(stack: Served, *parts: Part, **more: Any) -> dict[str, int]:
    """Return how many items were hits, encoded or local, according to the proxy."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    reply = stack.client.chat.completions.with_raw_response.create(
        model=stack.model, messages=messages, max_tokens=1, extra_body=more
    )
    pairs = (pair.split("=") for pair in reply.headers["x-epd-items"].split(","))
    return {name: int(count) for name, count in pairs if count != "0"}


@contextmanager
def preprocessed(stack: Served) -> Iterator[list[float]]:
    """Yield a list; at its end, fill in the items that each engine preprocessed, encode first."""
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
def test_answers_of_hits_equal_those_of_the_engine_without_proxy(
    stack: Served, stream: bool
) -> None:
    item, other = unseen(stack), unseen(stack)
    first = check_equal(stack, item, text("what?"), stream=stream)
    assert check_equal(stack, item, text("what?"), stream=stream) == first
    mixed = check_equal(stack, other, item, text("which?"), stream=stream)
    assert check_equal(stack, other, item, text("which?"), stream=stream) == mixed


def test_a_picture_and_a_video(stack: Served) -> None:
    parts = picture("cat.jpg"), picture("ball.gif", "video_url"), text("both")
    first = check_equal(stack, *parts, stream=False)
    assert check_equal(stack, *parts, stream=False) == first


def test_processor_kwargs_are_other_entries_and_are_found_again(stack: Served) -> None:
    item, words = unseen(stack), text("how large?")
    kwargs = {"mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112}}
    plain = check_equal(stack, item, words, stream=False)
    small = check_equal(stack, item, words, stream=False, **kwargs)

    assert plain != small
    assert check_equal(stack, item, words, stream=False, **kwargs) == small
    assert items_of(stack, item, words, **kwargs) == {"hit": 1}
    assert check_equal(stack, item, words, stream=False) == plain


@pytest.mark.fault(21)
def test_entries_deleted_between_lookup_and_load_fail_no_request(stack: Served) -> None:
    """Row 21 with deletions all the time, instead of at a moment that the test chooses."""
    item, words = unseen(stack), text("still?")
    expected = check_equal(stack, item, words, stream=False)
    stop = threading.Event()

    def delete() -> None:
        with open_store(stack.stack.store) as store:
            # Some entries are loaded in time: a request that waits for one in vain takes 10 s.
            while not stop.wait(random.uniform(0.002, 0.1)):  # noqa: S311 - a test
                with suppress(StoreUnavailable):  # a busy server is late
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


@pytest.mark.fault(16)
def test_the_store_stops_while_requests_run(stack: Served) -> None:
    item, words = unseen(stack), text("and now?")
    expected = check_equal(stack, item, words, stream=False)
    [server] = stack.redis
    asked = threading.Event()

    def stop() -> None:
        asked.wait(120)
        server.kill()

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        answers = []
        for _ in range(20):
            answers.append(ask(stack.client, stack.model, item, words))
            asked.set()
    finally:
        stopping.join()
        server.start()

    assert answers == [expected] * 20


@pytest.fixture
def origin() -> Iterator[ThreadingHTTPServer]:
    """Run a web server that serves `content`, with its digest as ETag."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.server.content  # type: ignore[attr-defined]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            fresh = self.headers.get("If-None-Match") == etag
            self.send_response(304 if fresh else 200)
            self.send_header("ETag", etag)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", "0" if fresh else str(len(content)))
            self.end_headers()
            if not fresh:
                self.server.sent += 1  # type: ignore[attr-defined]
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.sent = b"", 0  # type: ignore[attr-defined]
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


PROXY_FETCHES = (
    *("--media-fetch", "proxy", "--allow-http-media", "--allow-private-media"),
    *("--allowed-media-domains", "127.0.0.1"),
)


@pytest.mark.parametrize("flags", [(), PROXY_FETCHES], ids=["engine", "proxy"])
def test_a_picture_behind_a_url_that_changes_is_never_stale(
    stack: Served, origin: Any, flags: tuple[str, ...]
) -> None:
    remote = image(f"http://127.0.0.1:{origin.server_address[1]}/picture.jpg")
    with (
        another_proxy(stack, *flags) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        for name in ("cat.jpg", "coffee.jpg", "cat.jpg"):
            origin.content = (MEDIA / name).read_bytes()
            alone = {**picture(name), "uuid": f"{name}-{flags}"}
            expected = ask(stack.baseline, stack.model, alone, text())
            sent = origin.sent
            for _ in range(2):
                assert ask(client, stack.model, remote, text()) == expected
            if flags:
                assert origin.sent == sent + 1  # an unchanged picture is not downloaded twice


def test_tenants_share_no_entry_and_no_name(stack: Served, tmp_path: Path) -> None:
    pairs = {"alice": "alice-key-0123456789", "bob": "bob-key-0123456789"}
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key_line(*pair)}\n" for pair in pairs.items()))
    keys.chmod(0o600)
    cat = picture("cat.jpg")
    with another_proxy(stack, "--api-keys-file", str(keys)) as url:

        def pushed(tenant: str) -> dict[str, Any]:
            reply = httpx.post(
                f"{url}/v1/media",
                json={"model": stack.model, "content": [{**cat, "uuid": "cat"}]},
                headers={"Authorization": f"Bearer {pairs[tenant]}"},
                timeout=180,
            )
            assert reply.status_code == 200, reply.text
            [item] = reply.json()["data"]
            return dict(item)

        def asked(tenant: str, part: Part) -> list[str]:
            with openai.OpenAI(
                base_url=f"{url}/v1", api_key=pairs[tenant], max_retries=0
            ) as client:
                return ask(client, stack.model, part, text("whose?"))

        by_name = {"type": "image_url", "image_url": None, "uuid": "cat"}
        first = pushed("alice")
        assert (first["result"], first["tokens"]) == ("encoded", 294)
        with pytest.raises(openai.NotFoundError):
            asked("bob", by_name)
        assert pushed("alice")["result"] == "hit"
        assert pushed("bob")["result"] == "encoded"
        assert pushed("bob")["key"] != first["key"]
        expected = check_equal(stack, cat, text("whose?"), stream=False)
        for tenant in pairs:
            assert asked(tenant, by_name) == asked(tenant, cat) == expected
