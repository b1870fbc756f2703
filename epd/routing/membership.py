"""Which instances take part."""

from collections.abc import Iterable

from epd.routing.instances import Instance, InstanceTable


def replace(table: InstanceTable, before: Iterable[Instance], after: Iterable[Instance]) -> None:
    """Have a source's instances take part, and those no more that it had and has not.

    An instance that stays keeps its health and its load; requests of one that goes end as they
    would.

    Args:
        table: where they are, with those of other sources.
        before: the source's until now.
        after: the source's from now on.
    """
    staying = set(after)
    for instance in before:
        if instance not in staying:
            table.remove(instance)
    for instance in after:
        table.add(instance)
