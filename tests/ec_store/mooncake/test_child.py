"""Reads of the process that runs Mooncake's library.

The library and its engine of transfers are fakes: real ones do not fail on demand.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ec_store.mooncake.child import DONE, FAILED, Operations

ADDRESS = 4096
OWNER = "owner:1"
SIZE = 1000
ROOM = 2000


def replica(*, memory: bool = True, status: str = "COMPLETE", size: int = SIZE) -> Mock:
    value = SimpleNamespace(size=size, buffer_address=7, transport_endpoint=OWNER)
    return Mock(
        is_memory_replica=Mock(return_value=memory),
        status=SimpleNamespace(name=status),
        get_memory_descriptor=Mock(return_value=SimpleNamespace(buffer_descriptor=value)),
    )


def parts(replicas: Sequence[Mock], results: Sequence[int] = (0, DONE)) -> tuple[Mock, Mock]:
    """Return a library that has these replicas of the value, and an engine with these results."""
    library = Mock()
    library.batch_get_replica_desc.return_value = {"value": replicas} if replicas else {}
    library.batch_get_into.return_value = [SIZE]
    engine = Mock()
    engine.batch_transfer_async_read.return_value = 5
    engine.transfer_check_status.side_effect = results
    return library, engine


def read(library: Mock, engine: Mock | None) -> Sequence[int]:
    """Read a value of an owner that the library has read from."""
    found: Sequence[int] = Operations(library, engine, None, ADDRESS, {OWNER}).read("value", ROOM)
    return found


def test_a_value_is_read_by_a_transfer_of_the_engine() -> None:
    library, engine = parts([replica(memory=False), replica(status="PROCESSING"), replica()])

    assert read(library, engine) == [SIZE]
    engine.batch_transfer_async_read.assert_called_once_with(OWNER, [ADDRESS], [7], [SIZE])
    assert engine.transfer_check_status.call_count == 2
    library.batch_get_into.assert_not_called()


@pytest.mark.parametrize(
    ("replicas", "results"),
    [
        ([], ()),
        ([replica(memory=False)], ()),
        ([replica(status="PROCESSING")], ()),
        ([replica(size=ROOM + 1)], ()),
        ([replica()], (0, FAILED)),
    ],
    ids=["missing", "on a disk", "not written yet", "too large", "failed"],
)
def test_the_library_reads_what_the_engine_does_not(
    replicas: Sequence[Mock], results: Sequence[int]
) -> None:
    """It has the result that the caller expects, or the reason why there is none."""
    library, engine = parts(replicas, results)

    assert read(library, engine) == [SIZE]
    library.batch_get_into.assert_called_once_with(["value"], [ADDRESS], [ROOM])


def test_a_transfer_that_cannot_begin_is_left_to_the_library() -> None:
    library, engine = parts([replica()])
    engine.batch_transfer_async_read.return_value = 0

    assert read(library, engine) == [SIZE]
    engine.transfer_check_status.assert_not_called()


def test_the_library_reads_from_each_owner_first_and_after_a_failure() -> None:
    library, engine = parts([replica()], (DONE, FAILED, DONE))
    operations = Operations(library, engine, None, ADDRESS, set())

    library.batch_get_into.return_value = [-800]
    assert operations.read("value", ROOM) == [-800]
    library.batch_get_into.return_value = [SIZE]
    for transfers, reads in ((0, 2), (1, 2), (2, 3), (3, 3)):
        assert operations.read("value", ROOM) == [SIZE]
        assert engine.batch_transfer_async_read.call_count == transfers
        assert library.batch_get_into.call_count == reads


def test_over_rdma_the_library_reads() -> None:
    library, _ = parts([replica()])

    assert read(library, None) == [SIZE]
    library.batch_get_replica_desc.assert_not_called()
