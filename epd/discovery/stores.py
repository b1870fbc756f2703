"""Stores of registrations: their interface, and the page of the workers of one proxy."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from epd.discovery.entries import read_json, write_json
from epd.routing.instances import Instance
from epd.shared_page import PageUnreadable, SharedPage

Instances = tuple[Instance, ...]


class StoreFailed(Exception):
    """A read or a write failed. The message contains no secret."""


class Edit(NamedTuple):
    """A change: removes all instances with this URL, and adds the given one."""

    url: str
    instance: Instance | None = None

    def edited_instances(self, instances: Sequence[Instance]) -> Instances:
        others = tuple(instance for instance in instances if instance.url != self.url)
        return others if self.instance is None else (*others, self.instance)


class RegistrationStore(Protocol):
    """Registrations that several processes share."""

    async def read(self) -> Instances | None:
        """Return all registrations; None if the store is new, or has lost its data.

        Raises:
            StoreFailed: the store did not answer.
        """

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """Make a change, and return the result. A store that has lost its data first gets `known`.

        Raises:
            StoreFailed: the store did not answer; the change may have been made or not.
        """


LOCK_S = 5.0
"""Maximum wait for the lock of a page, in seconds. A process that takes longer hangs."""


class RegistrationsOnPage:
    """Registrations that end with the last worker. An unwritten page has none."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page

    async def read(self) -> Instances | None:
        try:
            content = self._page.read()
        except (OSError, PageUnreadable) as error:
            raise StoreFailed(str(error)) from error
        return () if content is None else read_json(content)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:  # noqa: ARG002
        try:
            async with asyncio.timeout(LOCK_S):
                while True:
                    try:
                        with self._page.hold_lock():
                            instances = await self.read() or ()
                            if edit is not None:
                                instances = edit.edited_instances(instances)
                            self._page.write(write_json(instances))
                            return instances
                    except BlockingIOError:  # another worker writes
                        await asyncio.sleep(0.01)
        except (OSError, TimeoutError) as error:
            raise StoreFailed(str(error) or "another worker holds the lock") from error
