"""Settings of transfers between instances (encoder outputs, KV blocks), and of their failures."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from epd.config.fields import (
    NO_INSTANCES,
    ConversationStore,
    Seconds,
    StoreUrl,
)
from epd.config.parts.instances import InstanceSettings
from epd.config.parts.named import flag_of
from epd.routing.instances import Role
from epd.transfer.flavours import EC_TRANSFERS, KV_TRANSFERS, ECTransferName, KVTransferName

MAX_TTL_S = 30 * 24 * 3600.0
"""Upper bound of a conversation's time to live, in seconds: longer than instances keep blocks, and
within the range of Redis."""


class TransferSettings(InstanceSettings):
    """Fields for transfers, the encoder-cache store and conversations, with their validation."""

    ec_transfer: ECTransferName = Field(
        default="store",
        description="transfer of encoder outputs to prefill, by the connector of the instances' "
        "--ec-transfer-config: ECStoreConnector (store), ECExampleConnector (example), "
        "ECCPUConnector with ec_enable_nixl (nixl), or ECMooncakeConnector (mooncake), which "
        "--ec-consumer-zmq-addrs also selects",
    )
    ec_store: StoreUrl = Field(
        default=None,
        description="URL of the encode instances' encoder-cache store, such as file:///dev/shm/ec "
        "or redis://host: items in it are not encoded again; default or 'none': no look-ups",
    )
    ec_store_budget_s: Seconds = Field(
        default=0.02,
        description="maximum time of a look-up in the store, in seconds; then all items are "
        "encoded",
    )
    ec_store_lease_s: Seconds = Field(
        default=30.0,
        description="seconds for which an entry is safe from eviction after its look-up",
    )
    kv_transfer: KVTransferName = Field(
        default="nixl",
        description="transfer of prefill's KV blocks to decode, by the connector of the instances' "
        "--kv-transfer-config",
    )
    decode_media: Literal["metadata", "raw"] = Field(
        default="metadata",
        description="form of a media item for prefill and decode: only placeholder metadata if the "
        "encode instance reports them (metadata), or always the media (raw)",
    )
    on_encode_failure: Literal["local", "fail"] = Field(
        default="local",
        description="if no encode instance could encode an item: prefill or decode encodes it "
        "(local), or the request fails (fail)",
    )
    on_prefill_failure: Literal["local", "fail"] = Field(
        default="local",
        description="if no prefill instance could prefill a request: decode gets the media and "
        "prefills it (local), or the request fails (fail)",
    )
    conversation_store: ConversationStore = Field(
        default=None,
        description="store for the state between the turns of a conversation: memory, or "
        "redis://host for several proxies or workers; default: memory",
    )
    conversation_ttl: Seconds = Field(
        default=450.0,
        le=MAX_TTL_S,
        description="time to live of this state, in seconds: more than 5 below the decode "
        "instances' decoder_kv_blocks_ttl (480)",
    )
    conversation_budget_s: Seconds = Field(
        default=0.05,
        description="maximum time of a look-up of this state, in seconds; then prefill computes "
        "the whole conversation",
    )
    max_conversations: int = Field(
        default=10_000, ge=0, description="maximum of conversations in memory, per process"
    )

    @model_validator(mode="before")
    @classmethod
    def _push_to_addresses(cls, given: Any) -> Any:
        # A script written for vLLM's example proxy sets only the addresses.
        addresses = given.get("ec_consumer_zmq_addrs") if isinstance(given, dict) else None
        if not addresses or str(addresses).strip().lower() in NO_INSTANCES:
            return given
        return {"ec_transfer": "mooncake", **given}

    @model_validator(mode="after")
    def _check_ec_transfer(self) -> Self:
        if self.ec_store is not None and not self.encodes:
            raise ValueError("--ec-store needs encode instances: only they write to it")
        transfer = EC_TRANSFERS[self.ec_transfer]
        if self.ec_store and not transfer.stored:
            raise ValueError(
                f"--ec-store needs --ec-transfer store: with {self.ec_transfer}, encoder outputs "
                "are not in a store"
            )
        if not transfer.pushed:
            if self.ec_consumer_zmq_addrs:
                raise ValueError("--ec-consumer-zmq-addrs needs --ec-transfer mooncake")
            return self
        if self.prefill_servers_urls:
            raise ValueError(
                "--ec-transfer mooncake needs --prefill-servers-urls disable (E+PD); for prefill "
                "instances, set ec_zmq_addrs in --instances-file or at their registration"
            )
        if self.discover_prefill or self.discover_prefill_decode:
            raise ValueError(
                "--ec-transfer mooncake excludes --discover-prefill and --discover-prefill-decode: "
                "DNS does not give the addresses that receive encoder outputs"
            )
        servers = len(self.decode_servers_urls)
        expected = servers * self.ec_consumer_dp_size
        if len(self.ec_consumer_zmq_addrs) != expected:
            raise ValueError(
                "--ec-consumer-zmq-addrs must have one address per data-parallel rank of each "
                f"decode instance: {expected} ({servers} instances x {self.ec_consumer_dp_size} "
                f"ranks), not {len(self.ec_consumer_zmq_addrs)}"
            )
        _check_apart("--ec-consumer-zmq-addrs", self.ec_consumer_zmq_addrs)
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        for urls, addresses in (
            ("prefill_servers_urls", "prefill_kv_addrs"),
            ("decode_servers_urls", "decode_kv_addrs"),
        ):
            found, wanted = len(getattr(self, addresses)), len(getattr(self, urls))
            if found and found != wanted:
                raise ValueError(
                    f"{flag_of(addresses)} needs one address per URL of {flag_of(urls)}: it has "
                    f"{found} for {wanted}"
                )
        transfer = KV_TRANSFERS[self.kv_transfer]()
        if self.conversation_store is not None and not transfer.bidirectional:
            able = [name for name, other in KV_TRANSFERS.items() if other.bidirectional]
            raise ValueError(
                f"--conversation-store needs --kv-transfer {' or '.join(able)}: with "
                f"{self.kv_transfer}, prefill cannot read decode's KV blocks of a conversation"
            )
        for instance in self.instances:
            try:
                transfer.check(instance)
            except ValueError as error:
                addrs = "prefill" if instance.role is Role.PREFILL else "decode"
                raise ValueError(f"{instance.url}: --{addrs}-kv-addrs: {error}") from None
        if transfer.named_apart:
            both = (*self.prefill_kv_addrs, *self.decode_kv_addrs)
            _check_apart("--prefill-kv-addrs, --decode-kv-addrs", both)
        return self


def _check_apart(flags: str, addresses: Sequence[str]) -> None:
    """Raise an error for an address of two instances: one would get the other's data."""
    for address in addresses:
        if address and addresses.count(address) > 1:  # empty: the instance needs no address
            raise ValueError(f"{flags}: {address!r} is named twice")
