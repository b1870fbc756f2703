"""Fake encode instances and consumers that check every parameter of an encoder-cache transfer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.requests import Part
from tests.support.fake_instance import Handler, decodes, refuses

METADATA = {
    "image": {"image_grid_thw": [1, 36, 54]},
    "video": {},  # sent as media, not as metadata
    "audio": {"audio_num_tokens": [50]},
}

Feature = tuple[str, str]
"""Modality and key of one encoder output."""


def features_of(body: Mapping[str, Any], part: Part) -> list[Feature]:
    """Return the features that vLLM makes of a content part, in order; none for text."""
    kind = part["type"]
    if kind.endswith("_embeds"):
        return [(kind.removesuffix("_embeds"), part["uuid"])]
    if kind == "text":
        return []
    modality = kind.removesuffix("_url").removeprefix("input_")
    media = json.dumps({name: value for name, value in part.items() if name != "uuid"})
    kwargs = body.get("mm_processor_kwargs") or {}
    key = part.get("uuid") or _hashed(media)
    if kwargs:
        key = _hashed(key + json.dumps(kwargs))
    if modality == "video" and kwargs.get("use_audio_in_video"):
        return [("audio", _hashed(f"{key}:sound")), ("video", key)]
    return [(modality, key)]


def all_features(body: Mapping[str, Any]) -> list[Feature]:
    """Return the features of all parts of a request."""
    return [feature for part in all_parts(body) for feature in features_of(body, part)]


def all_parts(body: Mapping[str, Any]) -> list[Part]:
    """Return the content parts of a request; a completion has none."""
    contents = [message["content"] for message in body.get("messages", ())]
    return [part for content in contents if isinstance(content, list) for part in content]


def has_media(body: Mapping[str, Any], key: str) -> bool:
    """Return whether a request contains the media with this key."""
    raw = [part for part in all_parts(body) if not part["type"].endswith("_embeds")]
    return any(key == found for part in raw for _, found in features_of(body, part))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _replied(params: Mapping[str, Any]) -> web.Response:
    return web.json_response({"choices": [], "ec_transfer_params": params})


class Strict:
    """Records each error and answers it with a status that the proxy does not retry."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def check(self, right: bool, what: object) -> None:
        if not right:
            self.wrong.append(str(what))
            raise web.HTTPBadRequest(text=str(what))


@dataclass
class Pushes(Strict):
    """vLLM's ECMooncakeConnector: outputs are pushed to an address and wait there for one request.

    Attributes:
        waiting: key of each push, by address and transfer id.
        pushed: number of pushes.
        own_ids: whether encode instances report transfer ids of their own.
    """

    waiting: dict[tuple[str, str], str] = field(default_factory=dict)
    pushed: list[tuple[str, str]] = field(default_factory=list)
    own_ids: bool = False
    wrong: list[str] = field(default_factory=list)

    async def encodes(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        """Do what `_prepare_push_spec` and a producer's `request_finished` do."""
        features = all_features(body)
        asked = body.get("ec_transfer_params")
        self.check(isinstance(asked, dict), f"encode got no push address: {asked}")
        assert asked is not None
        self.check(set(asked) == {"consumer_zmq", "ec_items"}, asked)
        items = asked["ec_items"]
        self.check([set(item) for item in items] == [{"transfer_id"}] * len(features), items)
        report: dict[str, Any] = {}
        for index, ((modality, key), item) in enumerate(zip(features, items, strict=True)):
            push = (asked["consumer_zmq"], item["transfer_id"])
            self.check(item["transfer_id"] not in {used for _, used in self.pushed}, "twice")
            self.pushed.append(push)
            self.waiting[push] = key
            entry = report.setdefault(key, {"modality": modality, "item_indices": []})
            entry["item_indices"].append(index)
            entry["metadata"] = METADATA[modality]
            entry["transfer_id"] = "mine" if self.own_ids else item["transfer_id"]
        return _replied(report)

    def consumes(self, *addresses: str, then: Handler = decodes) -> Handler:
        """Return a consumer that receives outputs at these addresses, one for each rank."""

        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            features = all_features(body)
            rank = request.headers.get("X-data-parallel-rank")
            self.check((rank is not None) == (len(addresses) > 1), f"rank {rank}")
            address = addresses[int(rank or 0)]
            params = body.get("ec_transfer_params")
            self.check((params is not None) == bool(features), params)
            items = [] if params is None else params["ec_items"]
            self.check(params is None or set(params) == {"ec_items"}, params)
            self.check(all(set(one) == {"mm_hash", "transfer_id"} for one in items), items)
            for index, (_, key) in enumerate(features):
                push = (address, _transfer_id(items, index, key))
                if self.waiting.pop(push, None) != key:
                    # vLLM waits for `push_wait_timeout_s`, whether or not the request has media.
                    return await refuses(500, "never pushed")(request, body)
            return await then(request, body)

        return chat


def _transfer_id(items: Sequence[Mapping[str, str]], index: int, key: str) -> str:
    """Return what `_request_transfer_id` returns for a consumer that gets keys."""
    if index < len(items) and items[index]["mm_hash"] == key:
        return items[index]["transfer_id"]
    return next((item["transfer_id"] for item in items if item["mm_hash"] == key), "")


@dataclass
class Folder(Strict):
    """Shared folder or store. A consumer dies if it is told of an output that is not there.

    Attributes:
        held: keys of the stored outputs.
    """

    held: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    async def encodes(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        """Store the outputs and report their keys."""
        self.check("ec_transfer_params" not in body, "an encode request needs none")
        report: dict[str, Any] = {}
        for index, (modality, key) in enumerate(all_features(body)):
            self.held.add(key)
            entry = report.setdefault(key, {"modality": modality, "item_indices": []})
            entry["item_indices"].append(index)
            entry["metadata"] = METADATA[modality]
        return _replied(report)

    def consumes(self, then: Handler = decodes) -> Handler:
        """Return a consumer that must be told exactly the keys that it has to look up."""

        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            keys = {key for _, key in all_features(body)}
            named = {key for key in keys if not has_media(body, key)}
            params = body.get("ec_transfer_params")
            self.check(named <= self.held, f"{named - self.held} are not there")
            self.check(params is None or set(params) == keys, params)
            return await then(request, body)

        return chat


@dataclass
class Memory(Strict):
    """vLLM's ECCPUConnector with NIXL: outputs in each encode instance, readable by all consumers.

    Attributes:
        held: outputs that were announced, by address and key.
        read: keys that consumers have read.
        full: whether nothing is kept, and so nothing is announced.
        silent: fields that it does not report of an output; vLLM always reports them.
    """

    held: dict[tuple[str, int, str], Mapping[str, Any]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    full: bool = False
    silent: str | None = None
    wrong: list[str] = field(default_factory=list)

    def encodes(self, port: int) -> Handler:
        """Do what `request_finished` of a producer with this side channel does."""

        async def chat(_: web.Request, body: dict[str, Any]) -> web.Response:
            self.check("ec_transfer_params" not in body, "an encode request needs none")
            report: dict[str, Any] = {}
            for index, (modality, key) in enumerate(all_features(body)):
                entry: dict[str, Any] = {"modality": modality, "item_indices": [index]}
                handle: dict[str, Any] = {
                    "peer_host": "e",
                    "peer_port": port,
                    "size_bytes": 486 * 512,
                    "shape": [486, 256],
                }
                if self.full:
                    report[key] = {**entry, "metadata": {}}
                    continue
                handle.pop(self.silent or "", None)
                self.held["e", port, key] = handle
                report[key] = {**entry, "metadata": METADATA[modality], **handle}
            return _replied(report)

        return chat

    def consumes(self, then: Handler = decodes) -> Handler:
        """Do what `_admit_item` of a consumer does."""

        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            params = body.get("ec_transfer_params") or {}
            for _, key in all_features(body):
                said = params.get(key, {})
                where = (said.get("peer_host"), said.get("peer_port"), key)
                held = self.held.get(where)
                if held is not None:
                    self.check(said.items() >= held.items(), said)
                    self.read.append(key)
                elif not has_media(body, key):
                    self.check("peer_host" in said, f"no peer was named for {key}")
                    return await refuses(500, "no longer there")(request, body)
            return await then(request, body)

        return chat
