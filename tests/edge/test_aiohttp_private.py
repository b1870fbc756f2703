"""Private names of aiohttp that `epd.edge.aiohttp_private` uses. A release may remove them."""

import inspect
import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.metadata import requires
from pathlib import Path

import pytest
from aiohttp import __version__, web, web_protocol

import ec_store
import epd
from epd.edge.aiohttp_private import AppRunner, BaseSite, RequestHandler, http_date

ATTRIBUTES = ("_messages", "_request_count", "_waiter")
PACKAGES = [Path(package.__file__ or "").parent for package in (epd, ec_store)]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_connection_has_the_attributes_that_message_tracking_reads(name: str) -> None:
    assert name in web.RequestHandler.__slots__


def test_a_site_closes_the_server_that_it_keeps() -> None:
    assert "_server" in web.BaseSite.__slots__


def test_a_runner_makes_its_server_by_one_method() -> None:
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)  # noqa: SLF001


def test_the_date_of_a_response_is_the_time_in_gmt() -> None:
    sent = parsedate_to_datetime(http_date())

    assert http_date().endswith(" GMT")
    assert abs(datetime.now(UTC) - sent) < timedelta(minutes=1)


def test_a_parser_error_is_a_separate_message() -> None:
    error = web_protocol._ErrInfo(400, ValueError(), "why")  # noqa: SLF001

    assert (error.status, error.message) == (400, "why")


@pytest.mark.parametrize("adapter", [RequestHandler, AppRunner, BaseSite])
def test_the_adapters_names_are_not_names_of_aiohttp(adapter: type) -> None:
    own = {name for name in vars(adapter) if not name.startswith("_")} - {"start"}

    assert not own & set(dir(adapter.__base__))


def test_private_names_of_aiohttp_are_imported_in_one_module() -> None:
    importing = re.compile(r"^from aiohttp\S* import .*\b_\w+", re.MULTILINE)
    modules = [path for package in PACKAGES for path in package.rglob("*.py")]

    assert [one.name for one in modules if importing.search(one.read_text())] == [
        "aiohttp_private.py"
    ]


def test_the_next_minor_version_is_not_installed_unseen() -> None:
    [bound] = [one for one in requires("epd-proxy") or [] if one.startswith("aiohttp<")]
    major, minor = map(int, __version__.split(".")[:2])

    assert bound.startswith(f"aiohttp<{major}.{minor + 1},")
