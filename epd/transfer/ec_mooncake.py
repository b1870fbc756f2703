"""vLLM's ECMooncakeConnector: the encode instance pushes each output to one consumer.

The wire is that of `vllm/distributed/ec_transfer/ec_connector/mooncake/scheduler.py`:
`_prepare_push_spec` reads what the encode request says, `_request_transfer_id` what the consumer's
does, and a consumer waits for the push of every item (`ensure_cache_available`), media or not.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from epd.errors import EncodeMismatch, NoInstance
from epd.routing.use import Place
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Encoded
from epd.transfer.params import Params


class ECMooncake(ECTransfer):
    """Each output is pushed under a transfer id, which both instances are told."""

    name = "mooncake"
    pushed = True

    def encode_params(self, consumer: Place | None, features: int) -> Params:
        """Where to push the item's outputs, and an id for each."""
        addresses = () if consumer is None else consumer.instance.ec_zmq_addrs
        if consumer is None or not addresses:
            raise NoInstance(
                "nobody has said where the consumer takes encoder outputs: "
                "--ec-consumer-zmq-addrs, or ec_zmq_addrs where it is registered",
                slug="no_ec_address",
                stage="encode",
            )
        ids = [{"transfer_id": uuid.uuid4().hex} for _ in range(features)]
        return {"consumer_zmq": addresses[consumer.rank or 0], "ec_items": ids}

    def encoded(self, replied: Encoded, asked: Params | None) -> Encoded:
        """What the encode instance said, with the id of each output's push.

        The ids that it was told count, each for the feature in its place. It reports them by key,
        of which one may stand for several pushes.
        """
        if not replied.params:
            raise EncodeMismatch("there are none: is it started with ECMooncakeConnector?")
        told = [str(item["transfer_id"]) for item in (asked or {}).get("ec_items", ())]
        params = {
            key: {**entry, "transfer_id": _transfer_id(entry, told)}
            for key, entry in sorted(replied.params.items(), key=_video_first)
        }
        ids = [entry["transfer_id"] for entry in params.values() if entry["transfer_id"]]
        if len(set(ids)) < len(ids):
            raise EncodeMismatch("two features have one place")
        return replace(replied, params=params)

    def consumer_params(self, encoded: Iterable[Encoded]) -> Params:
        """The ids of all pushes, in the order of the items, and the keys that they are of."""
        items = [
            {"mm_hash": key, "transfer_id": entry["transfer_id"]}
            for one in encoded
            for key, entry in one.params.items()
            if entry["transfer_id"]
        ]
        return {"ec_items": items} if items else {}


def _transfer_id(entry: Mapping[str, Any], told: list[str]) -> str | None:
    """The id of a feature's push; None: it has none, and its key alone leads to it."""
    match entry.get("item_indices", [0]):
        case [int() as index, *_] if 0 <= index < len(told):
            return told[index]
    reported = entry.get("transfer_id")
    return reported if isinstance(reported, str) else None


def _video_first(feature: tuple[str, Mapping[str, Any]]) -> bool:
    return feature[1].get("modality") != "video"
