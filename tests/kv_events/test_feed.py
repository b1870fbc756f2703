"""Messages with KV events of one engine: their order, their content, and what is lost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.kv_events.addresses import event_endpoints
from epd.kv_events.feed import EventFeed, FeedReport
from epd.kv_events.markers import marker_of
from epd.routing.instances import Instance, Role
from epd.routing.prefix import Prefix
from epd.routing.urls import events_address, named_events_address
from tests.support.kv_publisher import CLEARED, SIZE, batch, removed, stored

PROMPT = Prefix([11, 22], [2 * SIZE, 4 * SIZE])
MARK = marker_of(PROMPT)
BOTH = {11: 2 * SIZE, 22: 2 * SIZE}
HASHES = tuple(b"0" * 31 + letter for letter in (b"a", b"b", b"c", b"d"))


class Engine:
    """Messages of an engine, of which some are lost on the way to the feed."""

    def __init__(self) -> None:
        self.number = 0
        self.feed = EventFeed()

    def send(self, *events: dict[str, Any], lost: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        if not lost:
            self.feed.receive((b"topic", number.to_bytes(8, "big"), batch(*events)))

    def report(self) -> FeedReport:
        report = self.feed.take_report()
        assert report is not None
        assert self.feed.take_report() is None
        return report


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("hashes", [HASHES, (1, 2, 3, 4), (7, 8, 9, 2**64 - 1)])
def test_stored_and_removed_blocks_change_links(
    engine: Engine, hashes: tuple[bytes | int, ...]
) -> None:
    engine.send(stored(hashes, mark=MARK))
    assert engine.report() == FeedReport("", BOTH, {"stored": 1})
    engine.send(removed(hashes[3]))
    assert engine.report() == FeedReport("", {22: None}, {"removed": 1})


def test_a_gap_clears_the_index(engine: Engine) -> None:
    engine.send(stored(HASHES, mark=MARK))
    engine.send(removed(7), lost=True)
    engine.send(removed(HASHES[3]))

    report = engine.report()
    assert (report.fault, dict(report.changes)) == ("gap", {})
    assert report.counts["gap"] == 1
    engine.send(stored(HASHES, mark=MARK))
    assert engine.report() == FeedReport("", BOTH, {"stored": 1})


def test_a_new_subscription_has_no_gap(engine: Engine) -> None:
    engine.send(removed(7), lost=True)
    engine.send(stored(HASHES, mark=MARK))

    assert engine.report() == FeedReport("", BOTH, {"stored": 1})


def test_a_lower_sequence_number_means_a_new_engine(engine: Engine) -> None:
    for _ in range(3):
        engine.send(stored(HASHES, mark=MARK))
    engine.number = 0
    engine.send(stored(HASHES, mark=MARK))

    assert engine.report() == FeedReport("restarted", BOTH, {"stored": 4, "restarted": 1})


def test_a_lost_connection_and_cleared_blocks_clear_the_index(engine: Engine) -> None:
    engine.send(stored(HASHES, mark=MARK))
    engine.feed.record_fault("disconnected")
    assert engine.report() == FeedReport("disconnected", {}, {"stored": 1, "disconnected": 1})
    engine.send(CLEARED)
    assert engine.report() == FeedReport("cleared", {}, {"cleared": 1})
    engine.feed.record_fault("disconnected")
    engine.number = 0
    engine.send(CLEARED)
    assert engine.report().fault == "cleared"


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window", "group_idx": 2},
        {"session_id": "a client's"},
        {"session_id": None},
        {"a_later_field": 1},
    ],
)
def test_blocks_without_tokens_are_ignored(engine: Engine, more: dict[str, Any]) -> None:
    engine.send(stored([7]))
    engine.send({**stored(HASHES, mark=MARK), **more})

    known = dict(engine.report().changes)
    assert known == (BOTH if "a_later_field" in more else {})
    engine.send(removed(7, medium="CPU"), removed(7, group_idx=1))


def test_the_first_group_with_all_blocks_is_followed(engine: Engine) -> None:
    engine.send(stored(HASHES, mark=MARK, kv_cache_spec_kind="sliding_window", group_idx=0))
    engine.send(stored(HASHES, mark=MARK, group_idx=3), removed(HASHES[1], group_idx=0))

    assert dict(engine.report().changes) == BOTH


def test_links_that_the_event_loop_does_not_take_are_bounded(engine: Engine) -> None:
    engine.feed = EventFeed(max_changes=1)
    engine.send(stored(HASHES, mark=MARK))

    assert engine.report() == FeedReport("gap", {}, {"stored": 1, "gap": 1})


BAD_BATCHES = [
    b"",
    b"\xc1",
    batch({"type": "BlockMoved"}),
    batch(stored(HASHES, block_size=0)),
    batch(stored(HASHES, block_size=2**40)),
    batch(stored(["text"])),  # type: ignore[list-item]
    batch({"type": "BlockRemoved"}),
    b"\x91" * 100_000 + b"\x90",
]


@pytest.mark.parametrize("payload", BAD_BATCHES)
def test_a_malformed_batch_is_a_counted_fault(engine: Engine, payload: bytes) -> None:
    engine.send(stored(HASHES, mark=MARK))
    engine.feed.receive((b"", (1).to_bytes(8, "big"), payload))

    report = engine.report()
    assert (report.fault, dict(report.changes), report.counts["malformed"]) == ("malformed", {}, 1)
    engine.number = 2
    engine.send(stored(HASHES, mark=MARK))
    assert dict(engine.report().changes) == BOTH


@given(
    messages=st.lists(
        st.one_of(
            st.lists(st.binary(max_size=12), max_size=4),
            st.tuples(
                st.just(b""),
                st.integers(0, 4).map(lambda number: number.to_bytes(8, "big")),
                st.sampled_from(
                    [
                        *BAD_BATCHES,
                        batch(),
                        batch(stored(HASHES, mark=MARK)),
                        batch(stored(HASHES[1:], parent=HASHES[0], mark=MARK)),
                        batch(removed(*HASHES)),
                        batch(CLEARED),
                    ]
                ),
            ),
        ),
        max_size=12,
    )
)
def test_no_message_raises_and_removed_blocks_hold_nothing(messages: list[Any]) -> None:
    engine, known = Engine(), dict[int, int | None]()
    number = 100
    for frames in (*messages, *[(b"", b"", batch())] * 2):
        engine.feed.receive(frames)
        if (report := engine.feed.take_report()) is not None:
            if report.fault:
                known.clear()
            known |= report.changes
    for _ in range(len(messages) + 1):
        engine.number = number = number + 1
        engine.send(removed(*HASHES))
        if (report := engine.feed.take_report()) is not None:
            known |= report.changes

    assert not any(tokens is not None for tokens in known.values())


@pytest.mark.parametrize(
    ("kv_events", "addresses", "expected"),
    [
        ("", [], ["tcp://pd:5557", "tcp://pd:5558"]),
        ("", ["tcp://*:7"], ["tcp://pd:7", "tcp://pd:8"]),
        ("", ["http://pd:1=tcp://other:7"], ["tcp://other:7", "tcp://other:8"]),
        ("", ["http://x:1=tcp://other:7"], ["tcp://pd:5557", "tcp://pd:5558"]),
        ("tcp://[::1]:7", ["tcp://*:8"], ["tcp://[::1]:7", "tcp://[::1]:8"]),
        ("ipc://@name", [], ["ipc://@name"]),
    ],
)
def test_each_rank_has_an_address(
    kv_events: str, addresses: list[str], expected: list[str]
) -> None:
    one = Instance(Role.PREFILL_DECODE, "http://pd:1", dp_size=2, kv_events=kv_events)

    assert [*event_endpoints(one, addresses)] == expected


def test_ports_end_where_tcp_does() -> None:
    one = Instance(Role.PREFILL, "http://pd:1", dp_size=4, kv_events="tcp://a:65534")

    assert [*event_endpoints(one, [])] == ["tcp://a:65534", "tcp://a:65535"]


def test_ranks_that_the_instance_chooses_are_not_followed() -> None:
    assert [*event_endpoints(Instance(Role.DECODE, "http://d:1", dp_size=2), [])] == []
    assert len([*event_endpoints(Instance(Role.DECODE, "http://d:1"), [])]) == 1


@pytest.mark.parametrize("address", ["tcp://a:1", "tcp://*:5557", "tcp://[::1]:1", "ipc://@x"])
def test_an_address_names_an_instance_or_all(address: str) -> None:
    assert events_address(address) == address
    assert named_events_address(address) == ("", address)
    assert named_events_address(f"http://x:1={address}") == ("http://x:1", address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a:1",
        "http://a:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:70000",
        "tcp://a:1/path",
        "tcp://u@a:1",
        "tcp://a:1?replay=2",
        "tcp://a b:1",
        "tcp://a:1#x",
        "ipc://",
        "ipc://a\n",
    ],
)
def test_other_addresses_are_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        events_address(address)
