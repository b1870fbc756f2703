"""Settings of what instances hand over to each other, and what is done where they cannot."""

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
"""Of a conversation: far longer than any instance keeps blocks, and short enough for Redis."""


class TransferSettings(InstanceSettings):
    """Settings of what instances hand over to each other, and what is done where they cannot."""

    ec_transfer: ECTransferName = Field(
        default="store",
        description="how prefill gets encoder outputs: the connector of the instances' "
        "--ec-transfer-config, ECStoreConnector, ECExampleConnector, ECCPUConnector with "
        "ec_enable_nixl, or ECMooncakeConnector, which --ec-consumer-zmq-addrs selects by itself",
    )
    ec_store: StoreUrl = Field(
        default=None,
        description="the encode instances' encoder-cache store, such as file:///dev/shm/ec or "
        "redis://host: what it has is not encoded again; 'none': it is not asked",
    )
    ec_store_budget_s: Seconds = Field(
        default=0.02, description="a look-up in the store; after it everything is encoded"
    )
    ec_store_lease_s: Seconds = Field(
        default=30.0, description="how long what was looked up is safe from eviction"
    )
    kv_transfer: KVTransferName = Field(
        default="nixl",
        description="how decode gets prefill's KV blocks: the connector of the instances' "
        "--kv-transfer-config",
    )
    decode_media: Literal["metadata", "raw"] = Field(
        default="metadata",
        description="what prefill and decode get of a media item: placeholder metadata alone, "
        "where the encode instance reports it, or always the media",
    )
    on_encode_failure: Literal["local", "fail"] = Field(
        default="local",
        description="what becomes of an item that no encode instance could encode: prefill or "
        "decode get the media and encode them, or the request fails",
    )
    on_prefill_failure: Literal["local", "fail"] = Field(
        default="local",
        description="what becomes of a request that no prefill instance could prefill: decode gets "
        "the media and does it, or the request fails",
    )
    conversation_store: ConversationStore = Field(
        default=None,
        description="where is kept what the turns of a conversation leave for the next: memory, or "
        "redis://host for several proxies or workers",
    )
    conversation_ttl: Seconds = Field(
        default=450.0,
        le=MAX_TTL_S,
        description="how long, in seconds: below the decode instances' decoder_kv_blocks_ttl (480) "
        "by more than 5",
    )
    conversation_budget_s: Seconds = Field(
        default=0.05, description="a look-up there; after it the conversation is computed anew"
    )
    max_conversations: int = Field(
        default=10_000, ge=0, description="conversations kept in memory, of one process"
    )

    @model_validator(mode="before")
    @classmethod
    def _push_to_addresses(cls, given: Any) -> Any:
        # A script written for vLLM's example has the addresses alone.
        addresses = given.get("ec_consumer_zmq_addrs") if isinstance(given, dict) else None
        if not addresses or str(addresses).strip().lower() in NO_INSTANCES:
            return given
        return {"ec_transfer": "mooncake", **given}

    @model_validator(mode="after")
    def _check_ec_transfer(self) -> Self:
        if self.ec_store is not None and not self.encodes:
            raise ValueError("--ec-store needs encode instances: nobody else writes to it")
        transfer = EC_TRANSFERS[self.ec_transfer]
        if self.ec_store and not transfer.stored:
            raise ValueError(
                f"--ec-store needs --ec-transfer store: with {self.ec_transfer}, encoder outputs "
                "are in no store that could be asked"
            )
        if not transfer.pushed:
            if self.ec_consumer_zmq_addrs:
                raise ValueError("--ec-consumer-zmq-addrs needs --ec-transfer mooncake")
            return self
        if self.prefill_servers_urls:
            raise ValueError(
                "--ec-transfer mooncake goes with --prefill-servers-urls disable (E+PD); prefill "
                "instances can say where they take encoder outputs in --instances-file, or where "
                "they register, as ec_zmq_addrs"
            )
        if self.discover_prefill or self.discover_prefill_decode:
            raise ValueError(
                "--ec-transfer mooncake does not go with --discover-prefill and "
                "--discover-prefill-decode: a name does not say where encoder outputs are taken"
            )
        servers = len(self.decode_servers_urls)
        expected = servers * self.ec_consumer_dp_size
        if len(self.ec_consumer_zmq_addrs) != expected:
            raise ValueError(
                "--ec-consumer-zmq-addrs must have one address for each data-parallel rank of each "
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
                    f"{flag_of(addresses)} needs one address for each of {flag_of(urls)}: it has "
                    f"{found} for {wanted}"
                )
        transfer = KV_TRANSFERS[self.kv_transfer]()
        if self.conversation_store is not None and not transfer.bidirectional:
            able = [name for name, other in KV_TRANSFERS.items() if other.bidirectional]
            raise ValueError(
                f"--conversation-store needs --kv-transfer {' or '.join(able)}: with "
                f"{self.kv_transfer}, prefill cannot read what decode holds of a conversation"
            )
        for instance in (*self.instances, *self.discovered):
            try:
                transfer.check(instance)
            except ValueError as error:
                addrs = "prefill" if instance.role is Role.PREFILL else "decode"
                fault = f"--{addrs}-kv-addrs:" if instance.kv_addr else "--kv-transfer"
                raise ValueError(f"{instance.url}: {fault} {error}") from None
        if transfer.named_apart:
            both = (*self.prefill_kv_addrs, *self.decode_kv_addrs)
            _check_apart("--prefill-kv-addrs, --decode-kv-addrs", both)
        if transfer.needed and self.on_prefill_failure == "local":
            raise ValueError(
                f"--kv-transfer {self.kv_transfer} needs --on-prefill-failure fail: its decode "
                "instances wait for the blocks of every request"
            )
        return self


def _check_apart(flags: str, addresses: Sequence[str]) -> None:
    """Refuse an address that two would have: what is sent to the one came to the other."""
    for address in addresses:
        if address and addresses.count(address) > 1:  # an empty one is none
            raise ValueError(f"{flags}: {address!r} is named twice")
