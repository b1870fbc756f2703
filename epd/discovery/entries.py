"""Instances as they are written: in a file, in a store of registrations, in `POST /instances`."""

from collections.abc import Iterable
from typing import Annotated, Any, Self

import orjson
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.urls import base_url, zmq_address
from epd.routing.weights import check_weight
from epd.transfer.flavours import EC_TRANSFERS, ECTransferName

VERSION = 1
"""Of what is written."""

MAX_INSTANCES = 1024
"""More in one place are a mistake."""

MAX_RANKS = 1024

ADDRESS = r"[!-~]*"
"""What is sent to instances, and shown: no control characters, no spaces."""

NOT_FOR_OTHERS = "ec_zmq_addrs is for consumers: roles prefill and prefill_decode"

ZmqAddress = Annotated[str, AfterValidator(zmq_address), Field(max_length=256)]


class EntriesInvalid(ValueError):
    """What is written is no list of instances. The message quotes no more than URLs of it."""


class TransferMismatch(ValueError):
    """An instance and the proxy do not mean the same encoder-cache transfer."""


class Entry(BaseModel):
    """One instance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    url: Annotated[str, AfterValidator(base_url), Field(max_length=2048)]
    dp_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    kv_addr: str = Field(default="", max_length=256, pattern=f"^{ADDRESS}$")
    ec_zmq_addrs: tuple[ZmqAddress, ...] = ()
    weight: Annotated[float, AfterValidator(check_weight)] = 1.0

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.ec_zmq_addrs and len(self.ec_zmq_addrs) != self.dp_size:
            raise ValueError("ec_zmq_addrs needs one address for each data-parallel rank")
        return self

    @property
    def instance(self) -> Instance:
        """What takes part."""
        return Instance(
            self.role,
            self.url,
            self.dp_size,
            self.weight,
            kv_addr=self.kv_addr,
            ec_zmq_addrs=self.ec_zmq_addrs,
        )


class Registration(Entry):
    """The body of `POST /instances`, as vLLM's `disagg_epd_proxy.py` takes it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def check_transfer(self, transfer: ECTransferName) -> None:
        """Refuse an instance that would wait for what nobody sends, or get nothing.

        Raises:
            TransferMismatch: it has addresses for pushes, and there are none, or the other way
                round.
        """
        pushed = EC_TRANSFERS[transfer].pushed
        if self.role not in CONSUMERS:
            if self.ec_zmq_addrs:
                raise TransferMismatch(NOT_FOR_OTHERS)
        elif self.ec_zmq_addrs and not pushed:
            raise TransferMismatch(
                f"this proxy runs with --ec-transfer {transfer}: leave ec_zmq_addrs out, or start "
                "it with --ec-transfer mooncake"
            )
        elif pushed and not self.ec_zmq_addrs:
            raise TransferMismatch(f"with --ec-transfer {transfer} a consumer needs ec_zmq_addrs")


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Field(default=VERSION, ge=VERSION, le=VERSION)
    instances: Annotated[tuple[Entry, ...], Field(max_length=MAX_INSTANCES)]


def registration(body: bytes | bytearray) -> Registration:
    """What a request registers.

    Raises:
        EntriesInvalid: nothing that could be.
    """
    try:
        return Registration.model_validate_json(bytes(body))
    except ValidationError as invalid:
        raise EntriesInvalid(_first(invalid)) from None


def read_yaml(raw: bytes) -> tuple[Instance, ...]:
    """The instances of a file that people write; JSON is YAML too.

    Raises:
        EntriesInvalid: it is no such file.
    """
    try:
        # All scalars as text: what YAML takes for dates and numbers is no concern of this.
        document = yaml.BaseLoader(raw).get_single_data()  # which makes strings of all
    except (yaml.YAMLError, ValueError, RecursionError):
        raise EntriesInvalid("it is no YAML") from None
    return _read(document)


def read_json(raw: bytes) -> tuple[Instance, ...]:
    """What `write_json` wrote.

    Raises:
        EntriesInvalid: it did not write this.
    """
    try:
        return _read(orjson.loads(raw))
    except orjson.JSONDecodeError:
        raise EntriesInvalid("it is no JSON") from None


def write_json(instances: Iterable[Instance]) -> bytes:
    """Instances, to be read again."""
    document = {"version": VERSION, "instances": [_row(one) for one in instances]}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _row(one: Instance) -> dict[str, Any]:
    row: dict[str, Any] = {"role": one.role, "url": one.url, "dp_size": one.dp_size}
    # Proxies that do not know a field refuse it.
    if one.kv_addr:
        row["kv_addr"] = one.kv_addr
    if one.ec_zmq_addrs:
        row["ec_zmq_addrs"] = one.ec_zmq_addrs
    if one.weight != 1:
        row["weight"] = one.weight
    return row


def _read(document: Any) -> tuple[Instance, ...]:
    if not isinstance(document, dict):
        raise EntriesInvalid("it has no list called instances")
    try:
        found = _Document.model_validate(document)
    except (ValidationError, RecursionError) as invalid:
        said = _first(invalid) if isinstance(invalid, ValidationError) else "it is too deep"
        raise EntriesInvalid(said) from None
    for entry in found.instances:
        if entry.ec_zmq_addrs and entry.role not in CONSUMERS:
            raise EntriesInvalid(f"{entry.url}: {NOT_FOR_OTHERS}")
    instances = tuple(entry.instance for entry in found.instances)
    named = [(one.role, one.url) for one in instances]
    if len(set(named)) < len(named):
        twice = next(url for role, url in named if named.count((role, url)) > 1)
        raise EntriesInvalid(f"{twice!r} is named twice")
    return instances


def _first(invalid: ValidationError) -> str:
    error = invalid.errors()[0]
    where = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
