"""Names of a media item, and the digests that the proxy uses as names. No I/O.

From the client to the store, an item has these names:

- `MMItem.uuid`: the client's own name; it is never sent to an instance.
- `MMItem.content_key`: key that the proxy derives from the content and the tenant, if it can.
- `MMItem.engine_name`: that key, sent to engines as the part's `uuid` if its format has the field.
- `MMItem.identity`: what equal items have in common in this process: the key, or else the URL.
- `OutputKey`: the content key with all else on which an encoder output depends.
- `identifier`: vLLM's own name of an output (`mm_hash`): the entry's key in the store.

vLLM uses a `uuid` as it is, without the model's name and without checking the content
(`vllm/multimodal/processing/inputs.py`), so the sender of a uuid decides which encoder output a
request gets. The sender of a `cache_salt` decides from which prefix cache it is served. The proxy
therefore sends only digests that include the tenant. A client's own value is at most one more input
of such a digest.
"""

from typing import NamedTuple

from blake3 import blake3

from ec_store.bounded import BoundedDict
from epd.api.body import dump_json
from epd.api.items import MM_KWARGS, Body, MMItem
from epd.errors import BadRequest
from epd.media.parts import FRAMES, Inline
from epd.tenants import Scope

VERSION = b"epd-2"

MAX_LEARNED = 65536
"""Upper bound of the engine-made identifiers that are kept, and of the prefixes of models."""


class OutputKey(NamedTuple):
    """Identity of an encoder output before an engine has made it.

    Attributes:
        named: whether engines receive the key as the item's name; else they name it by a hash.
        kwargs: processor arguments that the content depends on, as JSON.
    """

    model: str | None
    content_key: str
    named: bool
    kwargs: bytes

    @property
    def is_verbatim(self) -> bool:
        """Whether engines name the output by the item's key, possibly with a prefix."""
        return self.named and not self.kwargs


def output_key(body: Body, item: MMItem) -> OutputKey | None:
    """Return the output that an item of a request needs; None if an engine makes the item's key."""
    if item.content_key is None:
        return None
    kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
    kwargs_json = dump_json(kwargs, sort_keys=True) if kwargs else b""
    model = body.get("model")
    model = model if isinstance(model, str) else None
    return OutputKey(model, item.content_key, item.is_named, kwargs_json)


class Identifiers:
    """Store keys of encoder outputs, as far as known."""

    def __init__(self) -> None:
        self._identifiers: BoundedDict[OutputKey, str] = BoundedDict(MAX_LEARNED)
        # The prefix that vLLM adds for a LoRA of the encoder (--enable-tower-connector-lora).
        self._prefixes: BoundedDict[str | None, str] = BoundedDict(MAX_LEARNED)

    def identifier_of(self, output: OutputKey) -> str | None:
        """Return the store key of an output; None if only an engine can compute it."""
        identifier = self._identifiers.get(output)
        if identifier is not None:
            self._identifiers.move_to_end(output)
            return identifier
        if not output.is_verbatim:
            return None
        return self._prefixes.get(output.model, "") + output.content_key

    def learn_identifier(self, output: OutputKey, identifier: str) -> None:
        if identifier == self.identifier_of(output):
            return
        if output.is_verbatim and identifier.endswith(output.content_key):
            self._identifiers.pop(output, None)
            self._prefixes[output.model] = identifier.removesuffix(output.content_key)
        else:
            self._identifiers[output] = identifier


def content_key(scope: Scope, modality: str, media: Inline) -> str:
    """Return the key of media in the request: 64 hexadecimal digits.

    It covers the base64 text, which determines the bytes uniquely once the engine's strict decoder
    has accepted it, and whether a video is a list of frames. vLLM ignores all else of the declared
    media type, and clients guess it.
    """
    frames = FRAMES if modality == "video" and media.media_type == FRAMES else ""
    parts = (modality.encode(), frames.encode(), blake3(media.base64).digest())
    return _digest(scope, b"blake3", *parts)


def name_key(scope: Scope, modality: str, uuid: str) -> str:
    """Return the key of a client's `uuid`: 64 hexadecimal digits.

    The scope includes the tenant even if tenants share entries: names are never shared.
    """
    return _digest(scope, b"name", modality.encode(), uuid.encode())


def conversation_key(scope: Scope, body: Body, name: str) -> str:
    """Return the key of a client's conversation id: 64 hexadecimal digits.

    It includes the model and the salt, because blocks of another model or salt are unusable. The
    scope includes the tenant even if tenants share entries.
    """
    others = dump_json([body.get("model"), body.get("cache_salt")])
    return _digest(scope, b"conversation", others, name.encode("utf-8", "surrogatepass"))


def with_salt(body: Body, scope: Scope) -> Body:
    """Return the body with a `cache_salt` of its tenant, derived from the client's own if present.

    If tenants share entries, the client's own salt is passed on unchanged.

    Raises:
        BadRequest: vLLM would reject the client's salt.
    """
    if scope.tenant is None:
        return body
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadRequest("cache_salt must be a non-empty string", param="cache_salt")
    client_salt = () if salt is None else (salt.encode(),)
    return {**body, "cache_salt": _digest(scope, b"salt", *client_salt)}


def _digest(scope: Scope, purpose: bytes, *parts: bytes) -> str:
    """Return the keyed BLAKE3 over length-framed parts, so that different lists never collide.

    An HMAC-SHA256 of OpenSSL takes 28 us beside other work, this 5 us.
    """
    whose = b"shared" if scope.tenant is None else b"tenant " + scope.tenant.name.encode()
    frames = [len(part).to_bytes(8, "big") + part for part in (VERSION, purpose, whose, *parts)]
    return blake3(b"".join(frames), key=blake3(scope.secret).digest()).hexdigest()
