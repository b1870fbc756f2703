"""The names we give: the `uuid` of an mm item, the `cache_salt` of a prompt.

vLLM takes a `uuid` as it is, without the model's name and without looking at the content
(`vllm/multimodal/processing/inputs.py`), so whoever names it decides which encoder output a
request gets; and whoever names a `cache_salt` decides whose prefix cache it is served from. Ours
are digests that hold the tenant, and a client's own is at most one more input of one.
"""

import hmac
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from epd.bodies.items import Body
from epd.bodies.parsing import dumped
from epd.errors import BadRequest
from epd.media.parts import Inline
from epd.tenants import Scope

VERSION = b"epd-2"


def content_key(scope: Scope, modality: str, media: Inline) -> str:
    """The key of media that are in the request: 64 hexadecimal digits.

    It covers the base64 text, which stands for its bytes one to one once the engine's strict
    decoder has accepted it, and the declared media type, by which vLLM picks a video's decoder.
    """
    content = blake3(media.base64).digest()
    parts = (modality.encode(), media.media_type.encode(), content)
    return _digest(scope, b"blake3", *parts)


def name_key(scope: Scope, modality: str, uuid: str) -> str:
    """The key of what a client calls `uuid`: 64 hexadecimal digits.

    The scope has the tenant even where tenants share their entries: what one calls so, another does
    not.
    """
    return _digest(scope, b"name", modality.encode(), uuid.encode())


def conversation_key(scope: Scope, body: Body, name: str) -> str:
    """The key of what a client calls a conversation: 64 hexadecimal digits.

    It holds the model and the salt: what is kept of a conversation with another is of no use.

    Args:
        scope: with the tenant, even where tenants share their entries.
        body: the request, with its salt.
        name: the client's.
    """
    others = dumped([body.get("model"), body.get("cache_salt")])
    return _digest(scope, b"conversation", others, name.encode("utf-8", "surrogatepass"))


def salted(body: Body, scope: Scope) -> Body:
    """The body with the `cache_salt` of its tenant, which a client's own is mixed into.

    Where tenants share, the client's own goes on as it came.

    Raises:
        BadRequest: the client's own is not what vLLM takes.
    """
    if scope.tenant is None:
        return body
    return {**body, "cache_salt": _digest(scope, b"salt", *_own_salt(body))}


def _own_salt(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    match body.get("cache_salt"):
        case None:
            return ()
        case str() as salt if salt:
            return (salt.encode(),)
        case _:
            raise BadRequest("cache_salt must be a non-empty string", param="cache_salt")


def _digest(scope: Scope, purpose: bytes, *parts: bytes) -> str:
    """HMAC-SHA256 over parts framed by their lengths, so that no two lists of parts are one."""
    whose = b"shared" if scope.tenant is None else b"tenant " + scope.tenant.name.encode()
    framed = [len(part).to_bytes(8, "big") + part for part in (VERSION, purpose, whose, *parts)]
    return hmac.digest(scope.secret, b"".join(framed), "sha256").hex()
