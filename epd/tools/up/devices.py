"""Devices of instances: those that the operator names, and the division of the others. No I/O."""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle

from epd.routing.instances import Role

Devices = tuple[str, ...]
"""Devices of one instance; its tensors are divided over them."""

LETTERS = {"e": Role.ENCODE, "p": Role.PREFILL, "d": Role.DECODE, "pd": Role.PREFILL_DECODE}
_DEVICE = re.compile(r"[\w./-]+", re.ASCII)


def parse_gpus(text: str) -> Mapping[Role, tuple[Devices, ...]]:
    """Read `e=0,p=1,d=2+3`: `+` joins devices of one instance, `:` or a second `e=` starts another.

    A text of another form raises `ValueError`.
    """
    named: dict[Role, tuple[Devices, ...]] = {}
    for word in text.split(","):
        letters, equals, instances = word.partition("=")
        role = LETTERS.get(letters.strip().lower())
        if role is None or not equals:
            raise ValueError(f"{word!r} is not of the form e=0, pd=1 or d=2+3")
        named[role] = (*named.get(role, ()), *parse_instances(instances))
    return named


def parse_instances(text: str) -> tuple[Devices, ...]:
    """Read `0:1` (two instances) or `2+3` (one on two devices); raise `ValueError` otherwise."""
    instances = tuple(
        tuple(device.strip() for device in instance.split("+")) for instance in text.split(":")
    )
    for devices in instances:
        if not all(map(_DEVICE.fullmatch, devices)) or len(set(devices)) != len(devices):
            raise ValueError(f"{text!r} is not of the form 0, 0:1 (two instances) or 2+3")
    return instances


def assign(
    roles: Sequence[Role], named: Mapping[Role, Sequence[Devices]], visible: Sequence[str]
) -> tuple[Devices, ...]:
    """Return the devices of each instance: those named for its role, or one of the others in turn.

    Encode instances use little of a device, so they share those that are left if each other
    instance gets a device.

    Raises:
        ValueError: devices are named for another number of instances than a role has, or an
            instance needs a device and none is visible.
    """
    for role, instances in named.items():
        if len(instances) != roles.count(role):
            raise ValueError(
                f"devices are named for {len(instances)} {role} instances, the topology has "
                f"{roles.count(role)}"
            )
    taken = {device for several in named.values() for devices in several for device in devices}
    others = [device for device in visible if device not in taken] or list(visible)
    if not others and not set(roles) <= named.keys():
        raise ValueError("no device is visible: name devices with --gpus, or use --device cpu")
    given = {role: iter(instances) for role, instances in named.items()}
    unnamed = [role for role in roles if role not in named]
    encoders = unnamed.count(Role.ENCODE)
    spare = max(0, min(encoders, len(others) - (len(unnamed) - encoders)))
    turns = cycle(others[spare:])
    encode_turns = cycle(others[:spare]) if spare else turns
    return tuple(
        next(given[role])
        if role in given
        else (next(encode_turns if role is Role.ENCODE else turns),)
        for role in roles
    )
