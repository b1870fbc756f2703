"""Private names of aiohttp that `epd.edge.protocol` uses. Another version may not have them."""

import inspect
import tomllib
from pathlib import Path

import pytest
from aiohttp import __version__, web, web_protocol

ATTRIBUTES = ("_messages", "_request_count", "_waiter")
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_connection_has_what_its_messages_are_followed_by(name: str) -> None:
    assert name in web.RequestHandler.__slots__


async def test_a_server_keeps_what_connections_are_made_with() -> None:
    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        raise NotImplementedError

    server = web.Server(handler, keepalive_timeout=7)

    assert vars(server)["_kwargs"]["keepalive_timeout"] == 7
    assert "_loop" in vars(server)


def test_a_runner_makes_its_server_by_one_method() -> None:
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)  # noqa: SLF001


def test_an_error_of_the_parser_is_a_message_of_its_own() -> None:
    error = web_protocol._ErrInfo(400, ValueError(), "why")  # noqa: SLF001

    assert (error.status, error.message) == (400, "why")


def test_the_next_minor_version_is_not_installed_unseen() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    [bound] = [one for one in project["dependencies"] if one.startswith("aiohttp>=")]
    major, minor = map(int, __version__.split(".")[:2])

    assert bound.endswith(f",<{major}.{minor + 1}")
