"""Settings of routing: coordination policies and load balancing."""

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
from epd.transfer.flavours import EC_TRANSFERS

MIN_LOAD_INTERVAL_S = 0.05
"""Minimum of `load_interval_s`, in seconds: more frequent load reports would slow the instance."""


class RouteSettings(TransferSettings):
    """Fields for coordination policies and load balancing, with their validation."""

    skip_prefill_below_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_TOKENS,
        description="text prompts with fewer estimated tokens are prefilled by decode itself "
        "(policy pd_only); 0: no prompts",
    )
    skip_prefill_for_text: bool = Field(
        default=False,
        description="decode itself prefills all prompts without media (policy pd_only)",
    )
    local_prefill_url: EndpointUrl = Field(
        default=None,
        description="URL of the prefill instance next to the proxy (policy "
        "prefill_local_decode_remote); default: the first one of --prefill-servers-urls",
    )
    policies: PolicyNames = Field(
        default=(),
        validate_default=True,
        description="coordination policies by name, comma-separated: the first one that applies to "
        "a request decides which stages run on which instances; options as in "
        "'pd_only?decode_choice=early'; default: derived from the other settings and the instances",
    )
    decode_choice: DecodeChoice = Field(
        default="late",
        description="time at which the decode instance is chosen: after the prefill response "
        "(late), or before the prefill request (early)",
    )
    decode_from: DecodeFrom = Field(
        default="table",
        description="source of the decode instance: the proxy's table of instances, the client's "
        "--decode-header if it is sent, or the endpoint picker at --decode-picker-url",
    )
    decode_header: HeaderName = Field(
        default="x-decoder-host-port",
        description="request header in which a client names the decode instance, as host:port, "
        "with --decode-from header",
    )
    decode_hosts: HostPatterns = Field(
        default=(),
        description="hosts that the header or the picker may name in addition to the known "
        "instances, comma-separated: names, *.domain, networks",
    )
    decode_picker_url: EndpointUrl = Field(
        default=None, description="URL of the endpoint picker, with --decode-from picker"
    )
    decode_picker_timeout_s: Seconds = Field(
        default=0.5, description="maximum time for the picker's response, in seconds"
    )
    encode_balance: ItemBalanceName = Field(
        default="affinity",
        description="choice of the encode instance of a media item: the same one per item "
        "(affinity) or per session (session) while its load is within a bound, round robin, the "
        "least loaded one, or the less loaded one of two random ones (power_of_two)",
    )
    prefill_balance: BalanceName = Field(
        default="least_load",
        description="choice of the prefill instance of a request, as for --encode-balance",
    )
    decode_balance: BalanceName = Field(
        default="least_load",
        description="choice of the decode instance of a request, as for --encode-balance",
    )
    load_interval_s: SecondsOrNone = Field(
        default=1.0,
        description="seconds between two reads of an instance's waiting and running requests (its "
        "/metrics); 0: neither its load nor its namespace is read",
    )
    session_header: HeaderName = Field(
        default="x-session-id",
        description="request header with the name of the request's session",
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
                    "without --decode-servers-urls, --decode-hosts is required: the hosts that may "
                    "be named to decode"
                )
        return self

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if 0 < self.load_interval_s < MIN_LOAD_INTERVAL_S:
            raise ValueError(f"--load-interval-s must be 0 or at least {MIN_LOAD_INTERVAL_S}")
        return self

    @field_validator("policies")
    @classmethod
    def _usual(cls, policies: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Return the policies of the settings above, then those that the instances allow."""
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
        """Return the active policies of their text forms; settings are their default options.

        Raises:
            ValueError: a policy is unknown or cannot be used.
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
            )
        return active

    @property
    def _decode_is_named(self) -> bool:
        """Return whether a client or a picker may name decode instances outside the table."""
        return self.decode_from != "table" or any(
            f"decode_from={other}" in one for one in self.policies for other in ("header", "picker")
        )
