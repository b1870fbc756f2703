"""Settings of routing: coordination policies and load balancing."""

from typing import Self

from pydantic import Field, model_validator

from epd.config.fields import (
    EndpointUrl,
    EventAddresses,
    HeaderName,
    HostPatterns,
    PolicyNames,
    SecondsOrNone,
    Section,
)
from epd.policies.policy import DecodeFrom
from epd.routing import BalanceName, ItemBalanceName
from epd.routing.instances import ANSWERING, Role

MAX_TOKENS = 2**31 - 1
"""Upper bound of a prompt's tokens, above that of any model."""
MAX_PIXELS = 2**40
"""Upper bound of a picture's pixels, above the largest that an engine accepts."""
MIN_LOAD_INTERVAL_S = 0.05
"""Minimum of `load_interval_s`, in seconds: more frequent load reports would slow the instance."""


class RouteSettings(Section):
    """Fields for coordination policies and load balancing, with their validation."""

    skip_prefill_below_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """text prompts with fewer estimated tokens are prefilled by decode itself (policy pd_only); 0:
    no prompts"""
    skip_prefill_for_text: bool = False
    """decode itself prefills all prompts without media (policy pd_only)"""
    local_prefill_url: EndpointUrl = None
    """URL of the prefill instance next to the proxy (policy prefill_local_decode_remote); default:
    the first one of --prefill-servers-urls"""
    encode_below_pixels: int = Field(default=0, ge=0, le=MAX_PIXELS)
    """pictures with fewer pixels (width x height) that are not in the store are left to prefill or
    PD, which encode them; encode instances get all other media (policy cost). Only if all instances
    that prefill have the ec_role ec_both; 0: no pictures"""
    policies: PolicyNames = Field(default=(), validate_default=True)
    """coordination policies by name, comma-separated: the first one that applies to a request
    decides which stages run on which instances; default: derived from the other settings and the
    instances"""
    decode_from: DecodeFrom = "table"
    """source of the decode instance: the proxy's table of instances, the client's --decode-header
    if it is sent"""
    decode_header: HeaderName = "x-decoder-host-port"
    """request header in which a client names the decode instance, as host:port, with --decode-from
    header"""
    decode_hosts: HostPatterns = ()
    """hosts that the header may name in addition to the known instances, comma-separated: names,
    *.domain, networks"""
    encode_balance: ItemBalanceName = "affinity"
    """choice of the encode instance of a media item: the same one per item (affinity) or per
    session (session) while its load is within a bound, round robin, the least loaded one, or the
    less loaded one of two random ones (power_of_two)"""
    prefill_balance: BalanceName = "least_load"
    """choice of the prefill instance of a request, as for --encode-balance, or content: the one
    with the lowest cost by its prefix cache and its queue"""
    decode_balance: BalanceName = "least_load"
    """choice of the decode instance of a request, as for --prefill-balance"""
    kv_events: bool = False
    """read the KV events of the instances (vLLM's --kv-events-config) for the balance content: what
    their prefix caches hold is then known, and not estimated; needs the extra kv-events"""
    kv_events_addrs: EventAddresses = ()
    """addresses of KV events, comma-separated: tcp://host:port for all instances (* stands for the
    instance's host), or URL=tcp://host:port for one; the rank of a data-parallel
    engine is added to the port; default: tcp://*:5557"""
    load_interval_s: SecondsOrNone = 1.0
    """seconds between two reads of an instance's waiting and running requests (its /metrics); 0:
    neither its load nor its namespace is read"""
    session_header: HeaderName = "x-session-id"
    """request header with the name of the request's session"""

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if 0 < self.load_interval_s < MIN_LOAD_INTERVAL_S:
            raise ValueError(f"--load-interval-s must be 0 or at least {MIN_LOAD_INTERVAL_S}")
        return self

    @property
    def content_roles(self) -> tuple[Role, ...]:
        """Return the roles of the instances that are chosen by content."""
        prefills = (Role.PREFILL,) if self.prefill_balance == "content" else ()
        return (*prefills, *(ANSWERING if self.decode_balance == "content" else ()))
