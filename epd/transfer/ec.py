"""From encode to prefill: what `ec_transfer_params` carry, whatever the connector.

The connectors are vLLM's in `vllm/distributed/ec_transfer/ec_connector`, and this project's.

vLLM's ECCPUConnector with `ec_enable_nixl`: consumers read outputs from the encode instance.

The wire is that of `vllm/distributed/ec_transfer/ec_connector/cpu/scheduler/__init__.py`:
`request_finished` says where an output is, `_admit_item` reads that. Any number of consumers can
read one, for as long as it is not evicted (first in, first out, `embedding_cache.py`); then the
request fails where it has no media, and can be sent once more with them.

vLLM's ECMooncakeConnector: the encode instance pushes each output to one consumer.

The wire is that of `vllm/distributed/ec_transfer/ec_connector/mooncake/scheduler.py`:
`_prepare_push_spec` reads what the encode request says, `_request_transfer_id` what the consumer's
does, and a consumer waits for the push of every item (`ensure_cache_available`), media or not.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from epd.errors import EncodeMismatch, NoInstance
from epd.routing.table import Place
from epd.transfer.encoded import Encoded
from epd.transfer.params import Params


class ECTransfer:
    """How a consumer gets encoder outputs, as far as the proxy has a part in it.

    This one carries what encode instances reply to the consumer, as it is. Others say what differs.

    Attributes:
        name: what it is chosen by.
        stored: whether outputs are in a store that can be asked about them (`EncoderCache`).
        pushed: whether an output goes to one consumer, which is chosen before it is encoded, and
            waits for it: no other can use it, and none encodes the item itself.
        handle: what an encode instance says of each output that a consumer can get.
    """

    name: ClassVar[str]
    stored: ClassVar[bool] = False
    pushed: ClassVar[bool] = False
    handle: ClassVar[tuple[str, ...]] = ()

    def encode_params(self, consumer: Place | None, features: int) -> Params | None:  # noqa: ARG002
        """`ec_transfer_params` of an item's encode request; None: it has none.

        Args:
            consumer: whom the outputs are for; None where that is chosen once they are there.
            features: how many outputs the item has.

        Raises:
            NoInstance: nobody has said where the consumer takes them.
        """
        return None

    def encoded(self, replied: Encoded, asked: Params | None) -> Encoded:  # noqa: ARG002
        """What is known of an item's outputs.

        Without what leads a consumer to them, their metadata are of no use: it needs the media.

        Args:
            replied: what the encode instance said.
            asked: `ec_transfer_params` of its request.

        Raises:
            UpstreamFailed: it did not do what it was asked for.
        """
        return replace(replied, metadata={}) if self.lacking(replied) else replied

    def lacking(self, encoded: Encoded) -> str | None:
        """What an encode instance should have said of an output, and has not; None: nothing."""
        return next(
            (
                name
                for entry in encoded.params.values()
                for name in self.handle
                if name not in entry
            ),
            None,
        )

    def consumer_params(self, encoded: Iterable[Encoded]) -> Params:
        """`ec_transfer_params` of the consumer's request; empty: it has none.

        Args:
            encoded: what is known of its items, in their order.
        """
        return {key: entry for one in encoded for key, entry in one.params.items()}


class Store(ECTransfer):
    """This project's ECStoreConnector: outputs are in a store, found by their key alone."""

    name = "store"
    stored = True


class Example(ECTransfer):
    """vLLM's ECExampleConnector: outputs are files in a folder that all share.

    It says nothing of them beforehand, and an engine that is told of one that is not there dies
    (`example_connector.py`). So nothing counts as there but what has just been encoded.
    """

    name = "example"


class ECNixl(ECTransfer):
    """Outputs stay in the encode instance's memory; its address goes on to the consumer."""

    name = "nixl"
    handle = ("peer_host", "peer_port", "size_bytes", "shape")


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
