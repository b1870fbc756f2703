"""Connectors whose instances find each other's blocks themselves, in what they share."""

from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params


class Untold(KVTransfer):
    """Nobody is told anything: vLLM's ExampleConnector, OffloadingConnector, a shared store."""

    name = "none"
    released = False

    def prefill_params(self, pair: Pair) -> None:  # noqa: ARG002
        """None."""
        return

    def decode_params(self, pair: Pair, replied: Params) -> None:  # noqa: ARG002
        """None."""
        return
