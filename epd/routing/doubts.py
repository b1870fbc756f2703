"""Answers of 500: whether the request or its instance is at fault. Pure.

Some requests fail on every instance, such as a video that the model's processor cannot read. Their
500s are no evidence against the instances. Another 500 is the instance's own. The same request at
another instance tells them apart.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from epd.errors import ProxyError
from epd.routing.instances import Instance
from epd.routing.table import InFlight

MAX_DOUBTS = 2
"""Number of 500s of proven instances after which the request is at fault: it is not sent again."""


class Doubt(NamedTuple):
    """A 500 of an instance.

    Attributes:
        subject: the item that the instance had to encode; None for the whole request.
        loads: whether an entry or a block may have been missing, which is not the instance's fault.
        names: whether media were sent under names. An instance that has cached a name without its
            media may have been at fault.
    """

    using: InFlight
    subject: Hashable
    loads: bool
    names: bool

    @property
    def blames_instance(self) -> bool:
        """Whether a success elsewhere shows that the instance is at fault.

        State that is lost fails requests that are under way together. If the instance had failed
        its last request when this one began, it probably fails at all.
        """
        return not self.loads or self.using.began_failing


@dataclass(slots=True)
class Doubts:
    """The 500s of one request that no success has explained yet."""

    _doubts: list[Doubt] = field(default_factory=list)

    def add(
        self,
        error: ProxyError,
        using: InFlight,
        subject: Hashable = None,
        *,
        loads: bool = False,
        names: bool = False,
    ) -> None:
        """Remember a request that has ended in this error, if it is a 500."""
        if error.engine_failed:
            self._doubts.append(Doubt(using, subject, loads, names))

    def settle(self, instance: Instance, subject: Hashable = None) -> None:
        """Count the failures of other instances after a success of `instance`.

        The success of the whole request explains all 500s, that of an item those of the item.
        """
        if not self._doubts:
            return
        settled = [doubt for doubt in self._doubts if subject in {None, doubt.subject}]
        self._doubts = [doubt for doubt in self._doubts if doubt not in settled]
        for doubt in settled:
            if doubt.blames_instance and doubt.using.instance != instance:
                doubt.using.blame_instance()

    @property
    def is_spent(self) -> bool:
        """Whether the request must not be sent again, because it fails on proven instances.

        500s of different items say nothing about each other. One 500 to named media is let pass.
        """
        proven = [doubt for doubt in self._doubts if doubt.using.was_proven]
        counts = Counter([doubt.subject for doubt in proven])
        whole = counts.pop(None, 0) - any(doubt.names for doubt in proven)
        return whole + max(counts.values(), default=0) >= MAX_DOUBTS
