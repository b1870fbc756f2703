from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.items import MMItem
from epd.errors import BadRequest
from epd.media.parts import Inline, Remote, check_inside, source
from tests.requests import data_url


def item(url: Any, kind: str = "image_url") -> MMItem:
    return MMItem(("messages", 0, "content", 0), kind, {"type": kind, kind: {"url": url}})


def inline(one: MMItem) -> tuple[str, bytes]:
    """Return the media type and the base64 of an item."""
    found = source(one)
    assert isinstance(found, Inline)
    return found.media_type, bytes(found.base64)


def test_a_data_url_is_inline() -> None:
    assert inline(item(data_url(b"abc", "Image/PNG"))) == ("image/png", b"YWJj")
    assert inline(item("DATA:;base64,YWJj")) == ("", b"YWJj")
    assert inline(item("data:audio/ogg;codecs=opus;base64,YWJj")) == ("audio/ogg", b"YWJj")
    frames = "data:video/jpeg;base64,YWJj,YWJj"
    assert inline(item(frames)) == ("video/jpeg", b"YWJj,YWJj")


def test_input_audio_equals_its_data_url() -> None:
    part = {"input_audio": {"data": "YWJj", "format": "WAV"}}
    url = item(data_url(b"abc", "audio/wav"), "audio_url")

    assert (
        inline(MMItem(("messages", 0, "content", 0), "input_audio", part))
        == inline(url)
        == ("audio/wav", b"YWJj")
    )


@pytest.mark.parametrize("name", ["wav,", "wav;base64,AAAA", {"a": 1, "b": 2}])
def test_a_format_that_would_move_the_beginning_of_a_sound_is_refused(name: object) -> None:
    """VLLM writes the format into a data: URL; its base64 begins after the first comma."""
    part = {"input_audio": {"data": "YWJj", "format": name}}
    with pytest.raises(BadRequest):
        source(MMItem(("messages", 0, "content", 0), "input_audio", part))


@pytest.mark.parametrize("url", ["https://a/b.png?x=1#f", "http://[::1]:80/b", "HTTPS://a/b"])
def test_http_is_remote_and_unchanged(url: str) -> None:
    assert source(item(url)) == Remote(url)


@pytest.mark.security("S9")
@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host/a.png", "/etc/passwd", "http:///a.png", "http://[::1/a.png"),
        *("http://user:pass@host/a.png", "http://good.com\\.evil.com/a.png", "http://a/\tb"),
        *("data:image/png,abc", "data:image/png;base64;x,abc", "data:image/png;base64"),
    ],
)
def test_a_url_that_an_engine_could_read_differently_is_refused(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        source(item(url))

    assert refused.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.security("S9")
def test_a_file_must_be_under_the_allowed_folder(tmp_path: Path) -> None:
    allowed = tmp_path / "media"
    allowed.mkdir()
    (tmp_path / "secret.png").touch()
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed / "good.png").touch()

    good = (allowed / "good.png").as_uri()
    assert source(item(good)) == Remote(good, f"{allowed}/good.png")
    check_file(good, allowed)
    for bad in (
        (allowed / "link.png").as_uri(),
        f"file://{allowed}/../secret.png",
        f"file://{allowed}/%2e%2e/secret.png",
        f"file://{allowed}",
        f"file:{allowed}/good.png",
        f"file://localhost{allowed}/good.png",
        f"{good}?x",
        f"{good}%00",
        "file:secret.png",
    ):
        with pytest.raises(BadRequest):
            check_file(bad, allowed)


def check_file(url: str, allowed: Path) -> None:
    found = source(item(url))
    assert isinstance(found, Remote)
    assert found.path is not None
    check_inside(found.path, allowed, "param")


def test_a_loop_of_symlinks_is_not_a_failure(tmp_path: Path) -> None:
    """Python before 3.13 raises when it resolves one; later versions fail when it is opened."""
    url = f"file://{tmp_path}/loop/x"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with suppress(BadRequest):
        check_file(url, tmp_path)


@given(
    st.text() | st.from_regex(r"(file|http|https|data):[/\\]{0,3}.*") | st.none() | st.integers()
)
def test_any_url_is_read_or_refused(url: object) -> None:
    try:
        found = source(item(url))
    except BadRequest as error:
        assert error.param is not None
    else:
        assert isinstance(found, Inline) or (isinstance(found, Remote) and found.url == url)
