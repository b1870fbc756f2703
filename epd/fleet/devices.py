"""Which devices each instance gets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

from epd.routing.instances import Role

Devices = tuple[str, ...]
"""The devices of one instance; over several its tensors are divided."""

LETTERS: Mapping[str, Role] = {
    "e": Role.ENCODE,
    "p": Role.PREFILL,
    "d": Role.DECODE,
    "pd": Role.PREFILL_DECODE,
}
ROUNDING = 1e-9
_DEVICE = re.compile(r"[\w./-]+", re.ASCII)


def parse(text: str) -> Mapping[Role, tuple[Devices, ...]]:
    """Read `e=0,p=1,d=2+3`: `+` joins devices of one instance, `:` or a second `e=` starts another.

    Raises:
        ValueError: it is not so written.
    """
    named: dict[Role, tuple[Devices, ...]] = {}
    for word in text.split(","):
        letters, equals, instances = word.partition("=")
        role = LETTERS.get(letters.strip().lower())
        if role is None or not equals:
            raise ValueError(f"{word!r} is not such as e=0, pd=1 or d=2+3")
        named[role] = (*named.get(role, ()), *parse_instances(instances))
    return named


def parse_instances(text: str) -> tuple[Devices, ...]:
    """Read `0:1` (two instances) or `2+3` (one instance on two devices).

    Raises:
        ValueError: it is not so written.
    """
    instances = tuple(
        tuple(device.strip() for device in instance.split("+")) for instance in text.split(":")
    )
    for devices in instances:
        if not all(map(_DEVICE.fullmatch, devices)) or len(set(devices)) != len(devices):
            raise ValueError(f"{text!r} names no devices such as 0, 0:1 (two instances) or 2+3")
    return instances


def assign(
    roles: Sequence[Role], named: Mapping[Role, Sequence[Devices]], visible: Sequence[str]
) -> tuple[Devices, ...]:
    """The devices of each instance: those named for its role, or one of the others in turn.

    Args:
        roles: the role of each instance.
        named: for a role, the devices of each of its instances.
        visible: the devices there are.

    Raises:
        ValueError: as many as a role has instances are not named, or there are none to take.
    """
    for role, instances in named.items():
        if len(instances) != roles.count(role):
            raise ValueError(
                f"devices for {len(instances)} {role} instances, the topology has "
                f"{roles.count(role)}"
            )
    taken = {device for several in named.values() for devices in several for device in devices}
    others = [device for device in visible if device not in taken] or list(visible)
    if not others and not set(roles) <= named.keys():
        raise ValueError("no device is visible: name them, or run on the CPU with --device cpu")
    given = {role: iter(instances) for role, instances in named.items()}
    turns = cycle(others)
    return tuple(next(given[role]) if role in given else (next(turns),) for role in roles)


def overfull(shares: Iterable[tuple[Devices, float]]) -> str | None:
    """A device of which instances want more memory than it has, if there is one.

    Args:
        shares: for each instance its devices and the part of their memory that it takes.
    """
    total: dict[str, float] = {}
    for devices, share in shares:
        for device in devices:
            total[device] = total.get(device, 0.0) + share
    return next((device for device, share in total.items() if share > 1 + ROUNDING), None)
