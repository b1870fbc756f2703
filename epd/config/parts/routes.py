"""Settings that say what runs where for a request: coordination policies and balance."""

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from epd.config.fields import (
    EndpointUrl,
    HeaderName,
    HostPatterns,
    PolicyNames,
    Seconds,
    SecondsOrNone,
)
from epd.config.parts.instances import ENCODE_SOURCES
from epd.config.parts.transfers import TransferSettings
from epd.policies.active import Active, activate
from epd.policies.conditional import MAX_TOKENS
from epd.policies.course import DecodeChoice, DecodeFrom
from epd.policies.suited import check_suited
from epd.routing.balance import BalanceName, ItemBalanceName
from epd.routing.instances import Instance, Role
from epd.transfer.flavours import EC_TRANSFERS, KV_TRANSFERS

MIN_LOAD_INTERVAL_S = 0.05
"""Asked more often, an instance would have more to do for questions than for requests."""


class RouteSettings(TransferSettings):
    """Settings that say what runs where for a request: coordination policies and balance."""

    skip_prefill_below_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_TOKENS,
        description="prompts of text, of fewer tokens by estimate, that decode prefills itself "
        "(policy pd_only); 0: none",
    )
    skip_prefill_for_text: bool = Field(
        default=False, description="let decode prefill all prompts without media (policy pd_only)"
    )
    local_prefill_url: EndpointUrl = Field(
        default=None,
        description="prefill instance beside the proxy (policy prefill_local_decode_remote); "
        "with that policy the first one by default",
    )
    policies: PolicyNames = Field(
        default=(),
        validate_default=True,
        description="what runs where for a request: policies by name, comma-separated, the first "
        "one that has something to say of a request decides; with options of their own as in "
        "'pd_only?decode_choice=early'; default: as the instances suggest",
    )
    decode_choice: DecodeChoice = Field(
        default="late",
        description="when the decode instance is chosen: once prefill has answered, or before it "
        "is asked",
    )
    decode_from: DecodeFrom = Field(
        default="table",
        description="who names the decode instance: the proxy of those it knows, the client by "
        "--decode-header where it sends one, or the service at --decode-picker-url",
    )
    decode_header: HeaderName = Field(
        default="x-decoder-host-port",
        description="header by which a client names the decode instance, as host:port, with "
        "--decode-from header",
    )
    decode_hosts: HostPatterns = Field(
        default=(),
        description="hosts that a header or a picker may name beside the instances that the proxy "
        "knows, comma-separated: names, *.domain, networks",
    )
    decode_picker_url: EndpointUrl = Field(
        default=None, description="endpoint picker that is asked, with --decode-from picker"
    )
    decode_picker_timeout_s: Seconds = Field(default=0.5, description="the picker's answer")
    encode_balance: ItemBalanceName = Field(
        default="affinity",
        description="which encode instance an item goes to: always the same one within a bounded "
        "load (affinity: for each item, session: for each session), each in turn, the one with the "
        "least to do, or of two at random the one with less",
    )
    prefill_balance: BalanceName = Field(
        default="least_load", description="the same of prefill instances"
    )
    decode_balance: BalanceName = Field(
        default="least_load", description="the same of decode instances"
    )
    load_interval_s: SecondsOrNone = Field(
        default=1.0,
        description="between two questions to an instance how many requests are waiting and "
        "running (its /metrics); 0: it is not asked, nor for its namespace",
    )
    session_header: HeaderName = Field(
        default="x-session-id",
        description="the request header that says which session a request is one of",
    )

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        sources = (
            "another source of these instances: --dynamic-registration, --instances-file, "
            "--discover-…"
        )
        if not self.encodes and "encode_servers_urls" not in self.model_fields_set:
            raise ValueError(
                f"--encode-servers-urls is required ('disable' for none), or {sources}"
            )
        decodes = self.decode_servers_urls or self.discover_decode or self.discover_prefill_decode
        if not (decodes or self.dynamic_registration or self.instances_file):
            if not self._decode_is_named:
                raise ValueError(f"--decode-servers-urls is required, or {sources}")
            if not self.decode_hosts:
                raise ValueError(
                    "without --decode-servers-urls, --decode-hosts is required: which hosts may be "
                    "named to decode"
                )
        return self

    @model_validator(mode="after")
    def _check_strangers(self) -> Self:
        if self.decode_hosts:
            try:
                KV_TRANSFERS[self.kv_transfer]().check(Instance(Role.DECODE, "http://stranger"))
            except ValueError as error:
                raise ValueError(
                    f"--decode-hosts cannot be used with --kv-transfer {self.kv_transfer}: {error}"
                ) from None
        return self

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if 0 < self.load_interval_s < MIN_LOAD_INTERVAL_S:
            raise ValueError(f"--load-interval-s must be 0, or {MIN_LOAD_INTERVAL_S} at least")
        return self

    @field_validator("policies")
    @classmethod
    def _usual(cls, policies: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Those that the settings above ask for, then what the instances can do."""
        if policies:
            return policies
        above = info.data.get
        asked = {
            "pd_only": above("skip_prefill_below_tokens") or above("skip_prefill_for_text"),
            "prefill_local_decode_remote": above("local_prefill_url"),
        }
        encodes = any(above(name) for name in ENCODE_SOURCES)
        stages = ("encode_prefill_decode", "encode_pd") if encodes else ("prefill_decode",)
        return (*(name for name, wanted in asked.items() if wanted), *stages)

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        self.activated(self.policies)
        return self

    def activated(self, policies: Sequence[str]) -> tuple[Active, ...]:
        """Policies, as they are written, with the settings that are their options.

        Raises:
            ValueError: one of them is none, or cannot be used.
        """
        local = self.local_prefill_url or next(iter(self.prefill_servers_urls), None)
        settings: Mapping[str, object] = {
            "skip_prefill_below_tokens": self.skip_prefill_below_tokens,
            "skip_prefill_for_text": self.skip_prefill_for_text,
            "local_prefill_url": local,
            "decode_choice": self.decode_choice,
            "decode_from": self.decode_from,
            "decode_picker_url": self.decode_picker_url,
        }
        active = activate(policies, settings)
        for one in active:
            url = one.options.get("local_prefill_url")
            if url is not None and url not in self.prefill_servers_urls and not self.dynamic:
                raise ValueError(f"{one.name}: {url} must be one of --prefill-servers-urls")
        if not self.dynamic:
            check_suited(
                active,
                frozenset(one.role for one in self.instances),
                pushed=EC_TRANSFERS[self.ec_transfer].pushed,
                needed=KV_TRANSFERS[self.kv_transfer].needed,
            )
        return active

    @property
    def _decode_is_named(self) -> bool:
        """Whether somebody else names decode instances, who may know those that nobody lists."""
        return self.decode_from != "table" or any(
            f"decode_from={other}" in one for one in self.policies for other in ("header", "picker")
        )
