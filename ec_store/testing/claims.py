"""Contract of claims in every store; the fixtures are those of `StoreContract`."""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import Store
from ec_store.keys import MAX_OWNER_BYTES
from ec_store.testing.stores import Opened, assert_same, entry, key, relaxed

ROUNDS = 100
SHORT_S = 0.1
FORK = multiprocessing.get_context("fork")
OWNERS = st.sampled_from(["a", "b", "c"])
SOME_KEYS = st.lists(st.integers(0, 3), max_size=5)


class Barrier(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...


def claimed_in_turn(store: Store, owner: str, barrier: Barrier) -> list[bool]:
    """Claim and release one key in each round; return whether the owner got it, for each round."""
    won = []
    for _ in range(ROUNDS):
        barrier.wait(120)
        [held] = store.claim([key()], owner, 30)
        barrier.wait(120)
        if held:
            store.release([key()], owner)
        won.append(held)
    return won


def taken_over(store: Store, owner: str, barrier: Barrier) -> list[bool]:
    """Claim keys with expired claims; return for each whether the owner got it."""
    won = []
    for n in range(ROUNDS):
        barrier.wait(120)
        won += store.claim([key(str(n))], owner, 30)
    return won


class Race(Protocol):
    def __call__(self, store: Store, owner: str, barrier: Barrier) -> list[bool]: ...


RACES = pytest.mark.parametrize("race", [claimed_in_turn, taken_over])


def leave_ended_claims(store: Store) -> None:
    assert all(store.claim([key(str(n)) for n in range(ROUNDS)], "dead", 0.01))
    time.sleep(0.05)


@contextmanager
def running(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Start the processes for the duration of the context, and kill them at the end."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def winners(won: Sequence[Sequence[bool]]) -> list[int]:
    return [sum(each) for each in zip(*won, strict=True)]


def claim_while_another_asks(store: Store) -> None:
    """Claim a key for a short time; the store must reject another claim in that time.

    A slow machine may let the time pass in between; the function then tries again.
    """
    while True:
        began = time.monotonic()
        assert store.claim([key()], "a", SHORT_S) == [True]
        if store.claim([key()], "b", 30) == [False]:
            return
        assert time.monotonic() - began >= SHORT_S, "a claim was lost before it expired"
        store.release([key()], "b")


class ClaimsContract:
    def test_a_claim_is_exclusive_and_renewed_only_by_its_owner(self, opened: Opened) -> None:
        left, other = opened(), opened()

        assert left.claim([key()], "a", 30) == [True]
        assert other.claim([key()], "b", 30) == [False]
        assert other.claim([key()], "a", 30) == [True]
        assert other.claim([key("other")], "b", 30) == [True]
        assert other.claim([key(namespace="other")], "b", 30) == [True]

    def test_claims_of_many_keys_are_answered_in_their_order(self, store: Store) -> None:
        store.claim([key("b"), key("d")], "other", 30)

        assert store.claim([key(n) for n in "abcda"], "me", 30) == [True, False, True, False, True]
        assert store.claim([], "me", 30) == []
        store.release([], "me")

    def test_a_stored_entry_is_found_and_not_claimed(self, opened: Opened) -> None:
        left, other = opened(), opened()
        left.put(key("there"), entry())
        left.put(key("both"), entry())
        other.claim([key("both"), key("others")], "b", 30)
        keys = [key(name) for name in ("there", "both", "others", "free", "free")]

        stored, both, *claims = left.claim_or_find(keys, "a", 30)
        assert [stored, both] == left.lookup(keys[:2])
        assert claims == [False, True, True]
        assert other.claim(keys, "b", 30) == [True, True, True, False, False]
        assert left.claim_or_find([], "a", 30) == []

    def test_a_claim_ends_and_another_takes_it(self, store: Store) -> None:
        claim_while_another_asks(store)
        time.sleep(SHORT_S + 0.1)

        assert store.claim([key()], "b", 30) == [True]
        assert store.claim([key()], "a", 30) == [False]

    def test_a_renewed_claim_lives_on(self, store: Store) -> None:
        store.claim([key()], "a", SHORT_S)
        assert store.claim([key()], "a", 30) == [True]
        time.sleep(SHORT_S + 0.1)

        assert store.claim([key()], "b", 30) == [False]

    def test_asking_for_anothers_claim_does_not_renew_it(self, store: Store) -> None:
        claim_while_another_asks(store)
        time.sleep(SHORT_S + 0.1)

        assert store.claim([key()], "c", 30) == [True]

    def test_a_renewed_claim_may_end_sooner(self, store: Store) -> None:
        store.claim([key()], "a", 30)
        store.claim([key()], "a", SHORT_S)
        time.sleep(SHORT_S + 0.1)

        assert store.claim([key()], "b", 30) == [True]

    def test_only_its_owner_releases_a_claim(self, opened: Opened) -> None:
        left, other = opened(), opened()
        left.claim([key("a"), key("b")], "a", 30)
        other.claim([key("c")], "b", 30)
        other.release([key(n) for n in "abc"], "b")

        assert other.claim([key(n) for n in "abc"], "c", 30) == [False, False, True]
        other.release([key("a"), key("none")], "a")
        assert other.claim([key("a"), key("b")], "c", 30) == [True, False]

    def test_an_owner_may_have_any_name(self, store: Store) -> None:
        owners = [
            " ",
            "  ",
            "a b",
            "b",
            "a",
            "\0",
            "\ud800",
            "line\n",
            "1.5 x",
            "x" * MAX_OWNER_BYTES,
        ]
        for n, owner in enumerate(owners):
            assert store.claim([key(str(n))], owner, 30) == [True]
            for each in owners:
                assert store.claim([key(str(n))], each, 30) == [each == owner]

    @pytest.mark.parametrize("owner", ["", "x" * (MAX_OWNER_BYTES + 1), "й" * MAX_OWNER_BYTES])
    def test_a_wrong_owner_is_refused(self, store: Store, owner: str) -> None:
        with pytest.raises(ValueError, match="owner"):
            store.claim([key()], owner, 30)
        with pytest.raises(ValueError, match="owner"):
            store.release([key()], owner)

    def test_entries_and_claims_are_nothing_to_each_other(self, store: Store) -> None:
        store.claim([key("claimed"), key("both")], "a", 30)
        store.put(key("both"), entry())
        before = store.stats()

        assert store.lookup([key("claimed"), key("both")])[0] is None
        assert [row.info and row.info.key for row in store.ls()] == [key("both")]
        assert [row.problem for row in store.verify(fix=True)] == [None]
        assert store.sweep() == 0
        assert store.stats().entries == before.entries
        assert store.delete([key("claimed")]) == 0
        assert store.purge("model") == 1
        assert store.claim([key("claimed"), key("both")], "b", 30) == [False, False]
        assert store.claim([key("free")], "b", 30) == [True]
        store.put(key("free"), entry())
        store.release([key("free")], "b")
        assert_same(entry(), store.get(key("free")))

    @relaxed
    @given(calls=st.lists(st.tuples(st.booleans(), OWNERS, SOME_KEYS), max_size=20))
    def test_claims_are_as_a_dictionary_of_owners(
        self, opened: Opened, calls: list[tuple[bool, str, list[int]]]
    ) -> None:
        holders: dict[int, str] = {}
        with opened() as store:
            for claims, owner, names in calls:
                keys = [key(str(n)) for n in names]
                if claims:
                    expected = [holders.setdefault(n, owner) == owner for n in names]
                    assert store.claim(keys, owner, 600) == expected
                else:
                    store.release(keys, owner)
                    holders = {
                        n: held for n, held in holders.items() if n not in names or held != owner
                    }
            for owner in "abc":
                store.release([key(str(n)) for n in range(4)], owner)

    @RACES
    def test_one_of_eight_threads_gets_a_claim(self, opened: Opened, race: Race) -> None:
        leave_ended_claims(opened())
        stores, barrier = [opened() for _ in range(8)], threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n: race(stores[n], f"owner {n}", barrier), range(8)))

        assert winners(won) == [1] * ROUNDS

    @RACES
    def test_one_of_four_processes_gets_a_claim(self, opened: Opened, race: Race) -> None:
        leave_ended_claims(opened())
        barrier, results = FORK.Barrier(4), FORK.Queue()

        def run(n: int) -> None:
            results.put(race(opened(), f"owner {n}", barrier))

        with running([FORK.Process(target=run, args=(n,)) for n in range(4)]):
            won = [results.get(timeout=60) for _ in range(4)]
        results.close()

        assert winners(won) == [1] * ROUNDS

    def test_the_claim_of_a_dead_holder_ends(self, opened: Opened) -> None:
        held = FORK.Event()

        def hold() -> None:
            store = opened()
            while all(store.claim([key()], "dead", 1)):
                held.set()
                time.sleep(0.2)

        with running([FORK.Process(target=hold)]):
            assert held.wait(60)
            assert opened().claim([key()], "b", 30) == [False]

        deadline = time.monotonic() + 60
        while opened().claim([key()], "b", 30) != [True]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
