"""vLLM's MooncakeConnector: prefill and decode are asked at once, and find each other by an id.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py`
of vLLM 0.33 (`update_state_after_alloc`, `MooncakeConnectorMetadata.add_new_req`) and of
`MooncakeBootstrapServer.query` in `mooncake_utils.py` beside it.
"""

from typing import Any
from urllib.parse import urlsplit

from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.routing.urls import service_url
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params

BOOTSTRAP_PORT = 8998
"""Of a prefill instance's bootstrap server (vLLM's `VLLM_MOONCAKE_BOOTSTRAP_PORT`)."""

MAX_RANKS = 1024
MAX_ENGINE_ID = 256
"""Characters of an engine's id; vLLM's own has some forty."""


class Mooncake(KVTransfer):
    """Decode reads prefill's blocks, of the engine that the bootstrap server names."""

    name = "mooncake"
    addressed = frozenset({Role.PREFILL})

    def check(self, instance: Instance) -> None:
        """Refuse a `kv_addr` that is no bootstrap server's."""
        super().check(instance)
        if instance.kv_addr:
            service_url(instance.kv_addr)

    def peer_url(self, prefill: Instance) -> str:
        """Where the instance's bootstrap server says which engines it has."""
        return f"{_bootstrap(prefill)}/query"

    def peer(self, said: Any) -> Params:
        """The id of each data-parallel rank's engine, by rank."""
        if not isinstance(said, dict) or not 0 < len(said) <= MAX_RANKS:
            raise _unusable()
        engines = {}
        for rank, entry in said.items():
            engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
            if not isinstance(engine_id, str) or not 0 < len(engine_id) <= MAX_ENGINE_ID:
                raise _unusable()
            engines[rank] = engine_id
        return engines

    def concurrent(self, pair: Pair) -> bool:  # noqa: ARG002
        """Always: prefill replies nothing that decode would wait for."""
        return True

    def prefill_params(self, pair: Pair) -> Params:
        """Those that make it keep its blocks under the id."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": _transfer_id(pair),
        }

    def decode_params(self, pair: Pair, replied: Params) -> Params:  # noqa: ARG002
        """Whose blocks are under the id."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": _bootstrap(pair.prefill),
            "remote_engine_id": _engine_id(pair),
            "transfer_id": _transfer_id(pair),
        }


def _bootstrap(prefill: Instance) -> str:
    if prefill.kv_addr:
        return service_url(prefill.kv_addr)
    host = urlsplit(prefill.url).hostname or ""
    return f"http://[{host}]:{BOOTSTRAP_PORT}" if ":" in host else f"http://{host}:{BOOTSTRAP_PORT}"


def _transfer_id(pair: Pair) -> str:
    return f"xfer-{pair.request_id}"


def _engine_id(pair: Pair) -> str:
    """The engine that prefills.

    Raises:
        UpstreamFailed: nobody can say which it is.
    """
    engines = pair.peer or {}
    if pair.prefill_rank is None and len(engines) == 1:
        [engine_id] = engines.values()
    else:
        engine_id = engines.get(str(pair.prefill_rank))
    if engine_id is None:
        raise UpstreamFailed(
            f"the prefill instance has {len(engines)} data-parallel ranks, and the proxy is told "
            "of another number: --ec-consumer-dp-size, dp_size",
            slug="prefill_ranks",
            stage="prefill",
        )
    return str(engine_id)


def _unusable() -> UpstreamFailed:
    return UpstreamFailed(
        "the prefill instance's bootstrap server does not say which engines it has",
        slug="prefill_no_peer",
        stage="prefill",
    )
