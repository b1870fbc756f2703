"""A running proxy: where it listens, and what its operator's routes answer."""

import re
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPErrorProcessor, ProxyHandler, Request, build_opener

from ec_store.arena.sockets import find_sockets, runtime_folder
from epd.json_or_none import json_or_none

TIMEOUT_S = 5.0
DEFAULT_PORT = 8000
_FLEET = re.compile(r"epd-up-(\d{1,5})", re.ASCII)
"""Name of the folder in which a fleet of `epd up` has the socket of its store."""


class NoAnswer(Exception):
    """Error of a proxy that does not answer. The message is for the operator."""


class KeyRejected(NoAnswer):
    """Error of a rejected key. A retry would fail too."""


def fleet_folder(port: int) -> Path:
    """Return the folder for the store's socket of the fleet with this port; it may not exist."""
    return runtime_folder() / f"epd-up-{port}"


def find_proxy() -> str:
    """Return the URL of the proxy of the only fleet on this host that has its own store.

    Without one it is that of the default port.

    Raises:
        NoAnswer: there are several.
    """
    names = (_FLEET.fullmatch(socket.parent.name) for socket in find_sockets())
    ports = [int(name[1]) for name in names if name is not None] or [DEFAULT_PORT]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    if len(urls) > 1:
        raise NoAnswer(f"several fleets run here: name one with --url: {' '.join(urls)}")
    return urls[0]


def ask_proxy(url: str, path: str, key: str | None, fields: Iterable[str]) -> dict[str, Any]:
    """Return the JSON object of an operator's route, which has these fields.

    Raises:
        KeyRejected: the proxy rejects the key.
        NoAnswer: the proxy does not answer, or has another version.
    """
    request = Request(url + path, headers={} if key is None else {"X-API-Key": key})  # noqa: S310 - http
    try:
        with build_opener(ProxyHandler({}), _AnyStatus).open(request, timeout=TIMEOUT_S) as answer:
            status, document = answer.status, json_or_none(answer.read())
    except (OSError, HTTPException) as error:  # TimeoutError is an OSError
        cause = error.reason if isinstance(error, URLError) else error
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise NoAnswer(
            f"{url} does not answer: {reason}. Is the proxy running there? --url names another"
        ) from None
    if status in {401, 403}:
        match document:
            case {"error": {"message": str() as reason}} | {"error": str() as reason}:
                pass
            case _:
                reason = str(status)
        raise KeyRejected(f"{url} rejects the request: {reason} (set EPD_ADMIN_API_KEY)")
    if not isinstance(document, dict) or not document.keys() >= set(fields):
        raise NoAnswer(f"{url} answered {status}: it is not an EPD proxy of this version")
    return document


class _AnyStatus(HTTPErrorProcessor):
    """Answers of every status: a redirect would send the key elsewhere."""

    def http_response(self, request: Request, response: Any) -> Any:  # noqa: ARG002 - urllib's
        return response

    https_response = http_response
