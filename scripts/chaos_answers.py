"""Responses of a fake instance of `chaos.py`, and the faults in sending them."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

DRIBBLES, DRIBBLE_S = 50, 0.1
"""Number of pieces of a slow response, and the seconds per piece."""


@dataclass(frozen=True)
class Answer:
    """Response to send.

    Attributes:
        pieces: body; the events if it is a stream.
        stream: whether the response is a stream.
        pause_s: delay before each piece, in seconds.
    """

    pieces: Sequence[bytes]
    stream: bool = False
    pause_s: float = 0.0


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    description = {"message": message, "type": "InternalServerError", "param": None, "code": status}
    return web.json_response({"error": description}, status=status, headers=headers)


# Faults before a response.


async def _fails(_: web.Request) -> web.Response:
    return error(500, "the engine is dead")


async def _is_busy(_: web.Request) -> web.Response:
    return error(429, "too many requests", {"Retry-After": "1"})


async def _is_overloaded(_: web.Request) -> web.Response:
    return error(503, "overloaded", {"Retry-After": "1"})


async def _hangs(_: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError("the request was not cancelled within an hour")


async def _resets(request: web.Request) -> web.Response:
    _reset(request)
    return web.Response()


async def _says_nothing_useful(_: web.Request) -> web.Response:
    return web.Response(body=b'{"choices": [', content_type="application/json")


# Ways of sending a response.


async def deliver(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = await _begin(request, answer)
    await _send(response, answer.pieces, answer.pause_s)
    return response


async def _breaks(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = await _first_half(request, answer)
    _reset(request)
    return response


async def _stalls(request: web.Request, answer: Answer) -> web.StreamResponse:
    await _first_half(request, answer)
    return await _hangs(request)


async def _ends_early(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = await _first_half(request, answer)
    if not answer.stream and request.transport is not None:
        request.transport.close()  # short of its Content-Length
    return response


async def _dribbles(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = await _begin(request, answer)
    whole = b"".join(answer.pieces)
    size = len(whole) // DRIBBLES + 1
    drops = [whole[start : start + size] for start in range(0, len(whole), size)]
    await _send(response, drops, DRIBBLE_S)
    return response


EARLY: Mapping[str, Callable[[web.Request], Awaitable[web.Response]]] = {
    "error": _fails,
    "busy": _is_busy,
    "overloaded": _is_overloaded,
    "hang": _hangs,
    "reset": _resets,
    "nonsense": _says_nothing_useful,
}
LATE: Mapping[str, Callable[[web.Request, Answer], Awaitable[web.StreamResponse]]] = {
    "break": _breaks,
    "stall": _stalls,
    "truncate": _ends_early,
    "dribble": _dribbles,
}


async def _begin(request: web.Request, answer: Answer) -> web.StreamResponse:
    kind = "text/event-stream" if answer.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    if not answer.stream:
        response.content_length = sum(map(len, answer.pieces))
    await response.prepare(request)
    return response


async def _first_half(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = await _begin(request, answer)
    await _send(response, _halves(b"".join(answer.pieces))[:1], answer.pause_s)
    return response


async def _send(response: web.StreamResponse, pieces: Iterable[bytes], pause_s: float) -> None:
    for piece in pieces:
        await asyncio.sleep(pause_s)
        await response.write(piece)


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()


def _halves(whole: bytes) -> list[bytes]:
    return [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
