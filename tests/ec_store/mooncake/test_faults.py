"""Faults of Mooncake: the master, segments, the client's process, and what is stored."""

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from ec_store import EntryKey
from ec_store.errors import StoreUnavailable
from ec_store.mooncake.client import FAILURES, Lane, Status
from ec_store.mooncake.tier import MooncakeTier
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.mooncake.conftest import OpenTier
from tests.ec_store.mooncake.tiers import SEGMENT, opened_tier, ready, running
from tests.ec_store.waiting import until
from tests.support.mooncake_server import MooncakeMaster
from tests.support.redis_server import RedisServer

PLAIN = "max_entry_bytes=16MiB"
MIB = 2**20


@pytest.fixture
def own_master(installed: None, tmp_path: Path) -> Iterator[MooncakeMaster]:
    """Start a master of this test alone, which soon forgets clients that are gone."""
    with MooncakeMaster(tmp_path, {"client_ttl": 2}) as master:
        yield master


@pytest.fixture
def patient_master(installed: None, tmp_path: Path) -> Iterator[MooncakeMaster]:
    """Start a master that forgets no client and evicts nothing that was looked up."""
    with MooncakeMaster(tmp_path, {"client_ttl": 600, "default_kv_lease_ttl": 60_000}) as master:
        yield master


def works(tier: MooncakeTier, name: str = "again") -> bool:
    """Return whether an entry can be written and read now."""
    with suppress(StoreUnavailable):
        tier.put(key(name), sized(MIB))
        return tier.get(key(name)) is not None
    return False


def misses(tier: MooncakeTier, one: EntryKey) -> bool:
    """Return whether an entry is neither found nor read."""
    with suppress(StoreUnavailable):
        return tier.find([one.digest]) == [None] and tier.get(one) is None
    return True


@pytest.mark.fault(140)
def test_a_master_that_is_killed_and_back_is_used_without_a_restart(
    own_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    tier = open_tier(own_master.url(SEGMENT))
    assert works(tier, "old")
    own_master.kill()

    with pytest.raises(StoreUnavailable):
        tier.find([key("old").digest])
    with pytest.raises(StoreUnavailable):
        tier.put(key("new"), entry())
    own_master.start()
    until(lambda: works(tier))
    assert tier.find([key("old").digest]) == [None]  # it knows no entry of before


@pytest.mark.fault(140)
def test_a_master_that_is_stopped_costs_each_call_the_timeout(
    own_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    tier = open_tier(own_master.url(f"{SEGMENT}&timeout=500ms"))
    assert works(tier)
    assert own_master.process is not None
    own_master.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            tier.find([key("again").digest])
    finally:
        own_master.process.send_signal(signal.SIGCONT)
    until(lambda: works(tier, "later"))


@pytest.mark.fault(140)
def test_a_tier_whose_master_starts_later_is_used_then(
    own_master: MooncakeMaster, library: None
) -> None:
    own_master.kill()
    tier = MooncakeTier.from_url(own_master.url(SEGMENT))
    try:
        with pytest.raises(StoreUnavailable):
            tier.find([key().digest])
        own_master.start()
        until(lambda: ready(tier) and works(tier))
    finally:
        tier.close()


@pytest.mark.fault(141)
def test_entries_of_a_segment_whose_owner_is_killed_are_misses(
    own_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    lost, reader = open_tier(own_master.url(SEGMENT)), open_tier(own_master.url(PLAIN))
    reader.put(key("lost"), sized(MIB, 1))
    running(lost.segment).process.kill()

    until(lambda: misses(reader, key("lost")))
    until(lambda: works(reader))  # the segment is mounted again by a new process
    assert lost.segment is not None
    assert lost.segment.starts == 2


@pytest.mark.fault(141)
def test_other_segments_serve_on_when_an_owner_is_killed(
    own_master: MooncakeMaster, library: None
) -> None:
    with opened_tier(own_master.url(SEGMENT)) as kept:
        kept.put(key("kept"), sized(MIB, 1))
        with opened_tier(own_master.url(SEGMENT)) as lost:
            lost.client.close()
            running(lost.segment).process.kill()
            until(lambda: works(kept))
            assert_same(sized(MIB, 1), kept.get(key("kept")))


@pytest.mark.fault(141)
def test_an_owner_that_hangs_delays_no_read_from_another(
    patient_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    hung = open_tier(patient_master.url(SEGMENT))
    hung.put(key("hung"), sized(MIB))
    writer = open_tier(patient_master.url(SEGMENT))
    reader = open_tier(patient_master.url(f"{PLAIN}&timeout=20s"))
    of_hung = owner_of(patient_master, hung, key("hung"))
    for number in range(60):
        elsewhere = key(str(number))
        writer.put(elsewhere, sized(MIB, 1))
        if owner_of(patient_master, writer, elsewhere) != of_hung:
            break
    stopped = running(hung.segment).process
    stopped.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.get, key("hung"))
            time.sleep(0.5)  # until it waits for the owner that hangs
            for _ in range(2):
                assert_same(sized(MIB, 1), reader.get(elsewhere))
            assert not waiting.done()
            running(reader.client.program).process.kill()
            with pytest.raises(StoreUnavailable):
                waiting.result()
    finally:
        stopped.send_signal(signal.SIGCONT)


def owner_of(master: MooncakeMaster, tier: MooncakeTier, one: EntryKey) -> str:
    return master.owner(tier._names.value(one))  # noqa: SLF001


@pytest.mark.fault(142)
def test_under_pressure_entries_are_evicted_or_refused_and_never_torn(
    own_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    tier = open_tier(own_master.url(SEGMENT))
    refused = 0
    for number in range(100):  # 200 MiB into 64
        try:
            tier.put(key(str(number)), sized(2 * MIB, number))
        except StoreUnavailable:
            refused += 1
            time.sleep(0.05)
    found = [tier.get(key(str(number))) for number in range(90, 100)]
    first = [tier.get(key(str(number))) for number in range(5)]

    for number, each in zip(range(90, 100), found, strict=True):
        if each is not None:
            assert_same(sized(2 * MIB, number), each)
    assert sum(each is not None for each in found) >= 5
    assert None in first
    assert refused == tier.counts.take_counts().get("drops", 0)


@pytest.mark.fault(143)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_ends_or_hangs_is_replaced_and_its_host_keeps_its_entries(
    master: MooncakeMaster, open_tier: OpenTier, sent: signal.Signals
) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&timeout=1s&prefix=replaced"))
    tier.put(key(), sized(MIB, 1))
    running(tier.client.program).process.send_signal(sent)

    with pytest.raises(StoreUnavailable):
        tier.get(key())
    until(lambda: tier.client.program.starts == 2)
    assert_same(sized(MIB, 1), tier.get(key()))
    assert tier.segment is not None
    assert tier.segment.starts == 1


@pytest.mark.fault(162)
def test_a_reply_after_its_deadline_is_not_that_of_the_next_call(
    master: MooncakeMaster, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&timeout=500ms&prefix=late"))
    tier.put(key(), sized(100))
    old = running(tier.client.program)
    monkeypatch.setattr(old.process, "kill", Mock())  # it takes long
    old.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        tier.find([key().digest])
    old.process.send_signal(signal.SIGCONT)

    with pytest.raises(StoreUnavailable):
        tier.get(key())
    old.process.send_signal(signal.SIGKILL)
    until(lambda: tier.client.program.starts == 2)
    assert_same(sized(100), tier.get(key()))


@pytest.mark.fault(143)
def test_a_client_is_replaced_after_failed_transfers_in_a_row(
    own_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    """The owner is stopped, so that its segment stays known and each transfer to it fails."""
    owner = open_tier(own_master.url(SEGMENT))
    reader = open_tier(own_master.url(f"{PLAIN}&timeout=1s"))
    reader.put(key(), sized(MIB, 1))
    running(owner.segment).process.send_signal(signal.SIGSTOP)

    until(lambda: misses(reader, key()) and reader.client.program.starts > 1)
    running(owner.segment).process.send_signal(signal.SIGCONT)
    until(lambda: works(reader))


@pytest.mark.fault(143)
def test_failed_transfers_in_a_row_are_counted(master: MooncakeMaster, open_tier: OpenTier) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&prefix=failed"))
    old = running(tier.client.program).process
    assert old.poll() is None
    for number in range(FAILURES):
        tier.client.count("get", [Status.TRANSFER_FAILED], running(tier.client.program))
        if number < FAILURES - 1:
            assert tier.client.program.starts == 1
            tier.client.count("get", [Status.NOT_FOUND], running(tier.client.program))
    until(lambda: tier.client.program.starts == 2)
    assert works(tier)


@pytest.mark.fault(143)
def test_a_client_that_cannot_be_started_is_started_later(
    master: MooncakeMaster, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&prefix=unstarted"))
    refused = Mock(side_effect=BlockingIOError("no more processes"))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refused)
        running(tier.client.program).process.kill()
        until(lambda: refused.called)
    until(lambda: tier.client.program.starts == 2)
    assert works(tier)


@pytest.mark.fault(144)
@pytest.mark.parametrize("blob", [b"", b"x", b"x" * 8, bytes(4096)])
def test_a_foreign_value_is_a_miss_and_is_replaced(
    master: MooncakeMaster, open_tier: OpenTier, blob: bytes
) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&prefix=foreign-{len(blob)}"))
    names = tier._names  # noqa: SLF001
    with tier.client.lane() as lane:
        lane.memory[: len(blob)] = blob
        lane.put([names.value(key()), names.head(key().digest)], [len(blob)] * 2)

    assert tier.find([key().digest]) == [None]
    assert tier.get(key()) is None
    assert tier.put(key(), sized(100)) is True
    assert_same(sized(100), tier.get(key()))


@pytest.mark.fault(144)
def test_the_entry_of_another_key_is_a_miss(master: MooncakeMaster, open_tier: OpenTier) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&prefix=other-key"))
    tier.put(key("a"), sized(100))
    names = tier._names  # noqa: SLF001
    with tier.client.lane() as lane:
        [size] = lane.get([names.value(key("a"))], MIB)
        head = size - 100
        lane.put([names.value(key("b")), names.head(key("b").digest)], [size, head])

    assert tier.find([key("b").digest]) == [None]
    assert tier.get(key("b")) is None
    assert tier.counts.take_counts()["corrupt"] == 2


@pytest.mark.fault(161)
def test_a_value_that_is_evicted_during_its_read_is_a_miss_and_not_corrupt(
    master: MooncakeMaster, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(master.url(f"{SEGMENT}&prefix=evicted"))
    tier.put(key(), sized(100))
    read = Lane.read

    def overwritten(lane: Lane, name: str) -> int:
        size = read(lane, name)
        lane.memory[size - 1] ^= 1
        lane.remove([name])
        return size

    monkeypatch.setattr(Lane, "read", overwritten)
    assert tier.get(key()) is None
    assert "corrupt" not in tier.counts.take_counts()


@pytest.mark.fault(145)
def test_claims_fail_with_their_redis_and_entries_do_not(
    master: MooncakeMaster, open_tier: OpenTier, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as redis:
        url = f"{SEGMENT}&prefix=claims&claims=redis://127.0.0.1:{redis.port}/0"
        tier = open_tier(master.url(url))
        assert tier.claim_missing([key().digest], b"owner", 5) == [True]

    with pytest.raises(StoreUnavailable):
        tier.claim_missing([key().digest], b"owner", 5)
    assert works(tier)


def test_many_clients_write_and_read(library: None, tmp_path: Path) -> None:
    """16 hosts with 4 calls at once each: 64 callers, and 18 processes of the library."""
    hosts, calls = 16, 4
    with ExitStack() as stack:
        # A transfer that takes longer than the lease is a miss: the default is 5 s.
        flags = {"default_kv_lease_ttl": 60_000}
        master = stack.enter_context(MooncakeMaster(tmp_path, flags))
        url = master.url(f"{PLAIN}&prefix=many")
        stack.enter_context(opened_tier(master.url(f"{SEGMENT}&prefix=many")))
        tiers = [stack.enter_context(opened_tier(url)) for _ in range(hosts)]

        def work(number: int) -> bool:
            own, other = key(str(number)), key(str((number + calls) % (hosts * calls)))
            tier = tiers[number // calls]
            tier.put(own, sized(100_000, number))
            until(lambda: tier.find([other.digest]) != [None])
            found = tier.get(other)
            expected = sized(100_000, (number + calls) % (hosts * calls))
            return found is not None and bytes(found.data) == bytes(expected.data)

        with ThreadPoolExecutor(hosts * calls) as pool:
            assert all(pool.map(work, range(hosts * calls)))
