"""vLLM's MooncakeConnector: prefill and decode run concurrently, and find each other by an id.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py`
of vLLM 0.33 (`update_state_after_alloc`, `MooncakeConnectorMetadata.add_new_req`) and of
`MooncakeBootstrapServer.query` in `mooncake_utils.py` beside it.
"""

from typing import Any
from urllib.parse import urlsplit

from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.routing.urls import service_url
from epd.transfer import Params
from epd.transfer.kv import Handover, KVTransfer

BOOTSTRAP_PORT = 8998
"""Default port of a prefill instance's bootstrap server (`VLLM_MOONCAKE_BOOTSTRAP_PORT`)."""

MAX_RANKS = 1024
MAX_ENGINE_ID = 256
"""Maximum length of an engine's id in characters; vLLM's own ids have about forty."""


class Mooncake(KVTransfer):
    """Transfer in which decode reads the blocks of the engine that the bootstrap server names."""

    name = "mooncake"
    has_peers = True
    addressed = frozenset({Role.PREFILL})

    def check(self, instance: Instance) -> None:
        super().check(instance)
        if instance.kv_addr:
            service_url(instance.kv_addr)

    def peer_url(self, prefill: Instance) -> str:
        """Return the URL at which the instance's bootstrap server lists its engines."""
        return f"{_bootstrap(prefill)}/query"

    def parse_peer(self, answer: Any) -> Params:
        """Return the id of each data-parallel rank's engine, by rank."""
        if not isinstance(answer, dict) or not 0 < len(answer) <= MAX_RANKS:
            raise _unusable()
        engines = {}
        for rank, entry in answer.items():
            engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
            if not isinstance(engine_id, str) or not 0 < len(engine_id) <= MAX_ENGINE_ID:
                raise _unusable()
            engines[rank] = engine_id
        return engines

    def decode_concurrent(self, peer: Params | None) -> bool:  # noqa: ARG002
        """Return True: prefill's reply has nothing that decode needs."""
        return True

    def prefill_params(self, handover: Handover) -> Params:
        """Return the parameters that make prefill keep its blocks under the transfer id."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": _transfer_id(handover),
        }

    def decode_params(self, handover: Handover, replied: Params) -> Params:  # noqa: ARG002
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": _bootstrap(handover.prefill),
            "remote_engine_id": _engine_id(handover),
            "transfer_id": _transfer_id(handover),
        }


def _bootstrap(prefill: Instance) -> str:
    if prefill.kv_addr:
        return service_url(prefill.kv_addr)
    host = urlsplit(prefill.url).hostname or ""
    return f"http://[{host}]:{BOOTSTRAP_PORT}" if ":" in host else f"http://{host}:{BOOTSTRAP_PORT}"


def _transfer_id(handover: Handover) -> str:
    return f"xfer-{handover.request_id}"


def _engine_id(handover: Handover) -> str:
    engines = handover.peer or {}
    if handover.prefill_rank is None and len(engines) == 1:
        [engine_id] = engines.values()
    else:
        engine_id = engines.get(str(handover.prefill_rank))
    if engine_id is None:
        raise UpstreamFailed(
            f"the prefill instance has {len(engines)} data-parallel ranks, but the proxy is "
            "configured for another number: correct --ec-consumer-dp-size, or the instance's "
            "dp_size",
            slug="prefill_ranks",
            stage="prefill",
        )
    return str(engine_id)


def _unusable() -> UpstreamFailed:
    return UpstreamFailed(
        "the prefill instance's bootstrap server did not send a valid list of its engines",
        slug="prefill_no_peer",
        stage="prefill",
    )
