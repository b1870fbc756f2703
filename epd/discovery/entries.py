"""Parsers of instances: in a file, in a store of registrations, in `POST /instances`."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Self

import orjson
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.urls import MAX_WEIGHT, base_url, check_weight, events_address, zmq_address

VERSION = 1
"""Version of the format."""

MAX_INSTANCES = 1024
"""Maximum number of instances in one place. More are assumed to be a mistake."""

MAX_RANKS = 1024

ADDRESS = r"[!-~]*"
"""Valid addresses, which are sent to instances and displayed: no control characters, no spaces."""

NOT_FOR_OTHERS = "ec_zmq_addrs is only for consumers: roles prefill and prefill_decode"

ZmqAddress = Annotated[str, AfterValidator(zmq_address), Field(max_length=256)]

EventsAddress = Annotated[
    str, AfterValidator(lambda address: address and events_address(address)), Field(max_length=256)
]


class EntriesInvalid(ValueError):
    """The text is not a valid list of instances. The message quotes at most URLs."""


class TransferMismatch(ValueError):
    """An instance and the proxy use different encoder-cache transfers."""


class InstanceEntry(BaseModel, frozen=True, extra="forbid"):
    """Instance as written in a file, a store or a request."""

    role: Role
    url: Annotated[str, AfterValidator(base_url), Field(max_length=2048)]
    """Base URL with http or https."""
    dp_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of data-parallel ranks of the instance."""
    kv_addr: str = Field(default="", max_length=256, pattern=f"^{ADDRESS}$")
    """Address of its KV connector, in the form of `--kv-transfer`."""
    ec_zmq_addrs: tuple[ZmqAddress, ...] = Field(default=(), max_length=MAX_RANKS)
    """Addresses at which a consumer receives encoder outputs with Mooncake: `tcp://host:port` for
    each rank."""
    weight: Annotated[
        float,
        AfterValidator(check_weight),
        WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_WEIGHT}),
    ] = 1.0
    """Relative weight of the instance: 0, or from 0.001 to 1000. 0 drains it: no new requests
    unless no other instance is available."""
    kv_events: EventsAddress = ""
    """Address of its KV events for `--kv-events`: `tcp://host:port`; `*` stands for its host."""

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.ec_zmq_addrs and len(self.ec_zmq_addrs) != self.dp_size:
            raise ValueError("ec_zmq_addrs needs one address for each data-parallel rank")
        return self

    @property
    def instance(self) -> Instance:
        """The instance for the registry, which has the same fields."""
        return Instance(**dict(self))


class Registration(InstanceEntry, frozen=True, extra="ignore"):
    """The body of `POST /instances`, in the format of vLLM's `disagg_epd_proxy.py`."""

    def check_transfer(self, transfer: str, *, pushed: bool) -> None:
        """Reject an instance that would wait for outputs without a sender, or receive none.

        Raises:
            TransferMismatch: it has addresses for pushes but the transfer does not push, or the
                opposite.
        """
        if self.role not in CONSUMERS:
            if self.ec_zmq_addrs:
                raise TransferMismatch(NOT_FOR_OTHERS)
        elif self.ec_zmq_addrs and not pushed:
            raise TransferMismatch(
                f"this proxy runs with --ec-transfer {transfer}: omit ec_zmq_addrs, or start the "
                "proxy with --ec-transfer mooncake"
            )
        elif pushed and not self.ec_zmq_addrs:
            raise TransferMismatch(f"with --ec-transfer {transfer} a consumer needs ec_zmq_addrs")


class _Document(BaseModel, extra="forbid"):
    version: int = Field(default=VERSION, ge=VERSION, le=VERSION)
    instances: Annotated[tuple[InstanceEntry, ...], Field(max_length=MAX_INSTANCES)]


def registration(body: bytes | bytearray) -> Registration:
    """Parse the body of a registration; raise `EntriesInvalid` for an invalid one."""
    try:
        return Registration.model_validate_json(bytes(body))
    except ValidationError as invalid:
        raise EntriesInvalid(_first(invalid)) from None


def read_yaml(raw: bytes) -> tuple[Instance, ...]:
    """Parse the instances in a file, in YAML or JSON; raise `EntriesInvalid` for an invalid one."""
    try:
        # BaseLoader keeps all scalars as text, so that YAML's dates and numbers are not converted.
        document = yaml.BaseLoader(raw).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):
        raise EntriesInvalid("it is not valid YAML") from None
    return _read(document)


def read_json(raw: bytes) -> tuple[Instance, ...]:
    """Parse the output of `write_json`; raise `EntriesInvalid` for anything else."""
    try:
        return _read(orjson.loads(raw))
    except orjson.JSONDecodeError:
        raise EntriesInvalid("it is not valid JSON") from None


def write_json(instances: Iterable[Instance]) -> bytes:
    """Return instances as JSON for `read_json`."""
    document = {"version": VERSION, "instances": rows(instances)}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def rows(instances: Iterable[Instance]) -> list[dict[str, Any]]:
    """Return instances as a JSON list for `read_rows`."""
    return [_row(instance) for instance in instances]


def read_rows(listed: list[dict[str, Any]]) -> tuple[Instance, ...]:
    """Parse the output of `rows`; raise `EntriesInvalid` for anything else."""
    return _read({"instances": listed})


def _row(instance: Instance) -> dict[str, Any]:
    # Older proxies reject unknown fields, so defaults are omitted.
    return {
        field.name: value
        for field in fields(instance)
        if (value := getattr(instance, field.name)) != field.default
    }


def _read(document: Any) -> tuple[Instance, ...]:
    if not isinstance(document, dict):
        raise EntriesInvalid("it has no list named instances")
    try:
        found = _Document.model_validate(document)
    except (ValidationError, RecursionError) as invalid:
        message = _first(invalid) if isinstance(invalid, ValidationError) else "nested too deeply"
        raise EntriesInvalid(message) from None
    for entry in found.instances:
        if entry.ec_zmq_addrs and entry.role not in CONSUMERS:
            raise EntriesInvalid(f"{entry.url}: {NOT_FOR_OTHERS}")
    instances = tuple(entry.instance for entry in found.instances)
    keys = [instance.key for instance in instances]
    if len(set(keys)) < len(keys):
        twice = next(url for role, url in keys if keys.count((role, url)) > 1)
        raise EntriesInvalid(f"{twice!r} is named twice")
    return instances


def _first(invalid: ValidationError) -> str:
    error = invalid.errors()[0]
    where = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
