"""Settings of transfers between instances (encoder outputs, KV blocks), and of their failures."""

from typing import Any, Literal

from pydantic import Field, model_validator

from epd.config.fields import (
    NO_INSTANCES,
    ConversationStore,
    ECTransferName,
    KVTransferName,
    Seconds,
    Section,
    StoreUrl,
)

MAX_TTL_S = 30 * 24 * 3600.0
"""Upper bound of a conversation's time to live, in seconds: longer than instances keep blocks, and
within the range of Redis."""


class TransferSettings(Section):
    """Fields for transfers, the encoder store and conversations, with their validation."""

    ec_transfer: ECTransferName = "store"
    """transfer of encoder outputs to prefill, by the connector of the instances'
    --ec-transfer-config: ECStoreConnector (store), ECExampleConnector (example), ECCPUConnector
    with ec_enable_nixl (nixl), or ECMooncakeConnector (mooncake), which --ec-consumer-zmq-addrs
    also selects; or one of an installed package"""
    ec_store: StoreUrl = None
    """URL of the encode instances' encoder store, such as shm:///run/ec-store/arena.sock or
    redis://host: items in it are not encoded again; shm+tls:// without a host: the memories of all
    hosts, by the servers that instances name; default or 'none': no lookups"""
    ec_store_budget_s: Seconds = 0.02
    """maximum time of a lookup in the store, in seconds; then all items are encoded"""
    ec_store_lease_s: Seconds = 30.0
    """seconds for which an entry is safe from eviction after its lookup"""
    kv_transfer: KVTransferName = "nixl"
    """transfer of prefill's KV blocks to decode, by the connector of the instances'
    --kv-transfer-config: nixl, nixl-push, mooncake, moriio, lmcache, multi, example, offloading,
    none, or one of an installed package"""
    decode_media: Literal["metadata", "raw"] = "metadata"
    """form of a media item for prefill and decode: only placeholder metadata if the encode instance
    reports them (metadata), or always the media (raw)"""
    on_encode_failure: Literal["local", "fail"] = "local"
    """if no encode instance could encode an item: prefill or decode encodes it (local), or the
    request fails (fail)"""
    on_prefill_failure: Literal["local", "fail"] = "local"
    """if no prefill instance could prefill a request: decode gets the media and prefills it
    (local), or the request fails (fail)"""
    conversation_store: ConversationStore = None
    """store for the state between the turns of a conversation: memory, or redis://host for several
    proxies or workers; default: memory"""
    conversation_ttl: Seconds = Field(default=450.0, le=MAX_TTL_S)
    """time to live of a conversation's state, in seconds: more than 5 below the decode instances'
    decoder_kv_blocks_ttl (480)"""
    conversation_budget_s: Seconds = 0.05
    """maximum time of a lookup of a conversation's state, in seconds; then prefill computes the
    whole conversation"""

    @model_validator(mode="before")
    @classmethod
    def _push_to_addresses(cls, settings: Any) -> Any:
        # A script written for vLLM's example proxy sets only the addresses.
        addresses = settings.get("ec_consumer_zmq_addrs") if isinstance(settings, dict) else None
        if not addresses or str(addresses).strip().lower() in NO_INSTANCES:
            return settings
        return {"ec_transfer": "mooncake", **settings}
