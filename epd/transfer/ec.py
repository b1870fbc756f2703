"""Encoder outputs from encode to prefill: the `ec_transfer_params` of each connector.

With this project's ECStoreConnector, the store has the outputs, by key alone. vLLM's connectors are
in `vllm/distributed/ec_transfer/ec_connector`:

- ECExampleConnector: outputs are files in a folder that all instances share. It does not report
  which outputs exist, and an engine dies of a request that names a missing one
  (`example_connector.py`). So only outputs that were just encoded count as available.
- ECCPUConnector with `ec_enable_nixl`: consumers read outputs from the encode instance. In
  `cpu/scheduler/__init__.py`, `request_finished` reports the location of an output, and
  `_admit_item` reads it. Any number of consumers can read an output until it is evicted (first in,
  first out, `embedding_cache.py`). After that a request without its media fails, and can be retried
  with its media.
- ECMooncakeConnector: the encode instance pushes each output to one consumer. In
  `mooncake/scheduler.py`, `_prepare_push_spec` reads the parameters of the encode request, and
  `_request_transfer_id` those of the consumer's request. A consumer waits for the push of every
  item (`ensure_cache_available`), even if its request has the media.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from epd.errors import EncodeMismatch, NoInstance
from epd.routing.table import Reservation
from epd.transfer import Params
from epd.transfer.encoded import OutputFacts


@dataclass(frozen=True, slots=True)
class ECTransfer:
    """Transfer of encoder outputs to a consumer, as far as the proxy takes part in it.

    The replies of encode instances are passed on to the consumer unchanged.

    Attributes:
        stored: whether outputs are in a store that the proxy can look up (`EncoderCache`).
        pushed: whether an output goes to a single consumer, which is chosen before the encode and
            waits for the output. No other consumer can use it, and no consumer encodes the item.
        handle: fields that an encode instance reports for each output that a consumer can get.
    """

    stored: bool = False
    pushed: bool = False
    handle: tuple[str, ...] = ()

    def encode_params(self, consumer: Reservation | None, features: int) -> Params | None:  # noqa: ARG002
        """Return the `ec_transfer_params` of the encode request of an item with `features` outputs.

        None for none. The consumer is None if it is chosen after the encode.

        Raises:
            NoInstance: the address at which the consumer receives outputs is unknown.
        """
        return None

    def output_facts(self, reply: OutputFacts, sent_params: Params | None) -> OutputFacts:  # noqa: ARG002
        """Return the known facts about an item's outputs.

        If the reply lacks a field of `handle`, the metadata are dropped: the consumer cannot get
        the outputs, and needs the media. `sent_params` are the parameters of the encode request.

        Raises:
            UpstreamFailed: the instance did not do what the request asked for.
        """
        return reply._replace(metadata={}) if self.missing_field(reply) else reply

    def missing_field(self, facts: OutputFacts) -> str | None:
        """Return the first field of `handle` that an output's report lacks; None if it has all."""
        entries = facts.params.values()
        names = (name for entry in entries for name in self.handle if name not in entry)
        return next(names, None)

    def consumer_params(self, outputs: Iterable[OutputFacts]) -> Params:
        """Return the `ec_transfer_params` of the consumer's request; empty for none."""
        return {key: entry for output in outputs for key, entry in output.params.items()}


class ECMooncake(ECTransfer):
    """Transfer by pushes: both instances get the transfer id of each output."""

    def encode_params(self, consumer: Reservation | None, features: int) -> Params:
        """Return the address to which the item's outputs are pushed, and an id for each output."""
        addresses = () if consumer is None else consumer.instance.ec_zmq_addrs
        if consumer is None or not addresses:
            raise NoInstance(
                "the address at which the consumer receives encoder outputs is unknown: set "
                "--ec-consumer-zmq-addrs, or ec_zmq_addrs at its registration",
                slug="no_ec_address",
                stage="encode",
            )
        ids = [{"transfer_id": uuid.uuid4().hex} for _ in range(features)]
        return {"consumer_zmq": addresses[consumer.rank or 0], "ec_items": ids}

    def output_facts(self, reply: OutputFacts, sent_params: Params | None) -> OutputFacts:
        """Return the encode instance's reply, with the id of each output's push.

        The ids of the request apply, each to the feature at its index. The reply has one id per
        key, and one key may stand for several pushes.
        """
        if not reply.params:
            raise EncodeMismatch("they are missing; start the instance with ECMooncakeConnector")
        sent_ids = [str(item["transfer_id"]) for item in (sent_params or {}).get("ec_items", ())]
        features = sorted(
            reply.params.items(), key=lambda feature: feature[1].get("modality") != "video"
        )
        params = {
            key: {**entry, "transfer_id": _transfer_id(entry, sent_ids)} for key, entry in features
        }
        ids = [entry["transfer_id"] for entry in params.values() if entry["transfer_id"]]
        if len(set(ids)) < len(ids):
            raise EncodeMismatch("two features have the same index")
        return reply._replace(params=params)

    def consumer_params(self, outputs: Iterable[OutputFacts]) -> Params:
        """Return the id of each push with the key of its output, in the order of the items."""
        items = [
            {"mm_hash": key, "transfer_id": entry["transfer_id"]}
            for output in outputs
            for key, entry in output.params.items()
            if entry["transfer_id"]
        ]
        return {"ec_items": items} if items else {}


def _transfer_id(entry: Mapping[str, Any], ids: list[str]) -> str | None:
    """Return the id of a feature's push; None if the feature is found by its key alone."""
    match entry.get("item_indices", [0]):
        case [int() as index, *_] if 0 <= index < len(ids):
            return ids[index]
    reported = entry.get("transfer_id")
    return reported if isinstance(reported, str) else None
