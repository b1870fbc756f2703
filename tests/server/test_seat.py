"""Shared memory of a worker that has died."""

from contextlib import ExitStack, closing

from epd.observe.worker_metrics import SharedPage
from epd.server.orders import mapped_ledger
from epd.server.workers import Seat, SharedState


def test_a_dead_worker_leaves_no_requests_of_tenants() -> None:
    with ExitStack() as stack:
        pages = [stack.enter_context(closing(SharedPage.new_page())) for _ in range(6)]
        tenants = pages[5]
        ledger = mapped_ledger(tenants.descriptor, 2)
        shared = SharedState(pages[:2], pages[2:4], None, pages[4], tenants, ledger)
        uses = [mapped_ledger(tenants.descriptor, 2).use_of(number, "alice") for number in (0, 1)]
        for use in uses:
            use.begin_request()
        assert [use.total_requests() for use in uses] == [2, 2]

        Seat(2, (), shared).bury_pages()

        assert uses[0].total_requests() == 1
