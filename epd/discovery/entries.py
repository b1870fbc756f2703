"""Instances as they are written: in a file, in a store of registrations, in `POST /instances`."""

from collections.abc import Iterable
from typing import Annotated, Any, Self

import orjson
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.urls import base_url
from epd.routing.weights import check_weight

VERSION = 1
"""Of what is written."""

MAX_INSTANCES = 1024
"""More in one place are a mistake."""

MAX_RANKS = 1024


class EntriesInvalid(ValueError):
    """What is written is no list of instances. The message quotes no more than URLs of it."""


class UnknownTransfer(ValueError):
    """An instance wants to be told of by an encoder-cache transfer that there is not."""


class Entry(BaseModel):
    """One instance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    url: Annotated[str, AfterValidator(base_url), Field(max_length=2048)]
    dp_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    weight: Annotated[float, AfterValidator(check_weight)] = 1.0

    @property
    def instance(self) -> Instance:
        """What takes part."""
        return Instance(self.role, self.url, self.dp_size, self.weight)


class Registration(Entry):
    """The body of `POST /instances`, as vLLM's `disagg_epd_proxy.py` takes it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ec_zmq_addrs: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.ec_zmq_addrs and len(self.ec_zmq_addrs) != self.dp_size:
            raise ValueError("ec_zmq_addrs needs one address for each data-parallel rank")
        return self

    def check_transfer(self) -> None:
        """Refuse an instance that would be waiting for what nobody sends.

        Raises:
            UnknownTransfer: it has addresses for Mooncake's encoder-cache transfer.
        """
        if self.ec_zmq_addrs:
            raise UnknownTransfer(
                "this proxy has no Mooncake encoder-cache transfer: leave ec_zmq_addrs out"
                if self.role in CONSUMERS
                else "ec_zmq_addrs is for consumers: roles prefill and prefill_decode"
            )


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
    document = {"version": VERSION, "instances": list(map(_row, instances))}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _row(one: Instance) -> dict[str, Any]:
    row: dict[str, Any] = {"role": one.role, "url": one.url, "dp_size": one.dp_size}
    # Proxies that know of no weights read what others have written.
    return row if one.weight == 1 else {**row, "weight": one.weight}


def _read(document: Any) -> tuple[Instance, ...]:
    if not isinstance(document, dict):
        raise EntriesInvalid("it has no list called instances")
    try:
        found = _Document.model_validate(document)
    except (ValidationError, RecursionError) as invalid:
        said = _first(invalid) if isinstance(invalid, ValidationError) else "it is too deep"
        raise EntriesInvalid(said) from None
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
