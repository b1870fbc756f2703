"""Buffers of entries: their pages, and the memory that stays mapped."""

from ec_store.buffers import UNUSED_BYTES, Buffers

MIB = 2**20


PAGE = 2 * MIB


def mapped_bytes(buffers: Buffers) -> int:
    return sum(map(len, buffers._lent))  # noqa: SLF001 - not visible from outside


def test_a_buffer_has_as_many_pages_as_its_entry() -> None:
    buffers = Buffers()
    for pages in (4, 2, 3, 1, 4, 2):
        assert memoryview(buffers.take_buffer(pages * PAGE - 1).obj).nbytes == pages * PAGE
    assert mapped_bytes(buffers) <= 10 * PAGE


def test_a_larger_buffer_is_cut_and_keeps_its_pages() -> None:
    buffers = Buffers()
    buffers.take_buffer(4 * PAGE)[:4] = b"mark"
    first = buffers.take_buffer(3 * PAGE)
    second = buffers.take_buffer(3 * PAGE)

    assert (bytes(first[:4]), bytes(second[:4])) == (b"mark", bytes(4))
    assert mapped_bytes(buffers) == 6 * PAGE


def test_unused_memory_is_bounded_by_memory_in_use() -> None:
    buffers = Buffers()
    held = [buffers.take_buffer(UNUSED_BYTES // 2) for _ in range(34)]
    del held[:10]
    small = [buffers.take_buffer(PAGE) for _ in range(4)]
    used = len(held) * UNUSED_BYTES // 2 + len(small) * PAGE

    assert mapped_bytes(buffers) <= used * 17 / 16
    del held, small
    buffers.take_buffer(2 * PAGE)
    assert mapped_bytes(buffers) <= UNUSED_BYTES + 2 * PAGE
