"""From encode to prefill: what `ec_transfer_params` carry, whatever the connector.

The connectors are vLLM's in `vllm/distributed/ec_transfer/ec_connector`, and this project's.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from epd.routing.use import Place
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
