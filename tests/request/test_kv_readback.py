"""Cooldowns of KV read-back: which prefill instance may not read from which engine, how long."""

from hypothesis import given
from hypothesis import strategies as st

from epd.request.kv_readback import HUNG_S, MOST, REST_S, Cooldown, Cooldowns


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_prefill_that_could_not_read_of_one_engine_reads_of_the_others() -> None:
    clock = Clock()
    resting = Cooldowns(clock)

    assert resting.record_failure("p", "a", hung=False) == Cooldown(REST_S, "a")
    assert resting.record_failure("p", "a", hung=False) is None
    assert not resting.may_read("p", "a")
    assert resting.may_read("p", "b")
    assert resting.may_read("other", "a")
    clock.now_s += REST_S
    assert resting.may_read("p", "a")


def test_a_prefill_that_never_read_blocks_and_hangs_gets_none() -> None:
    clock = Clock()
    resting = Cooldowns(clock)

    assert resting.record_failure("p", "a", hung=True) == Cooldown(HUNG_S, None)
    assert resting.record_failure("p", "b", hung=True) is None
    assert not resting.may_read("p", "b")
    assert resting.may_read("other", "a")
    clock.now_s += HUNG_S
    assert resting.may_read("p", "b")


def test_a_cooldown_blames_the_engine_if_the_prefill_instance_has_read_before() -> None:
    resting = Cooldowns(Clock())
    resting.read("p")

    assert resting.record_failure("p", "a", hung=True) == Cooldown(HUNG_S, "a")
    assert resting.record_failure("p", "a", hung=True) is None  # both were in progress together
    assert resting.may_read("p", "b")
    resting.read("p")
    assert resting.record_failure("p", "b", hung=True) == Cooldown(HUNG_S, "b")
    assert resting.record_failure("p", "c", hung=True) == Cooldown(HUNG_S, None)


def test_a_short_rest_becomes_a_long_one_and_never_the_other_way() -> None:
    clock = Clock()
    resting = Cooldowns(clock)
    resting.read("p")
    resting.record_failure("p", "a", hung=False)

    assert resting.record_failure("p", "a", hung=True) == Cooldown(HUNG_S, "a")
    assert resting.record_failure("p", "a", hung=False) is None
    clock.now_s += REST_S
    assert not resting.may_read("p", "a")


NAMES = st.sampled_from("pqr")
STEPS = st.lists(
    st.tuples(NAMES, st.sampled_from("ab"), st.sampled_from(["read", "failed", "hung", "wait"])),
    max_size=40,
)


@given(STEPS)
def test_a_cooldown_applies_only_to_the_pair_that_failed(
    steps: list[tuple[str, str, str]],
) -> None:
    clock = Clock()
    resting, failures = Cooldowns(clock), list[tuple[float, str, str, bool]]()
    for prefill, engine, step in steps:
        if step == "read":
            resting.read(prefill)
        elif step == "wait":
            clock.now_s += REST_S / 2
        else:
            resting.record_failure(prefill, engine, hung=step == "hung")
            assert not resting.may_read(prefill, engine)
            failures.append((clock.now_s, prefill, engine, step == "hung"))
        for one in "pqr":
            of_one = [it for it in failures if it[1] == one]
            for other in "ab":
                if resting.may_read(one, other):
                    continue
                assert any(
                    it[0] + (HUNG_S if it[3] else REST_S) > clock.now_s
                    and (it[2] == other or it[3])
                    for it in of_one
                )


def test_cooldowns_of_removed_instances_are_dropped() -> None:
    resting = Cooldowns(Clock())
    for number in range(3 * MOST):
        resting.read(f"r{number}")
        resting.record_failure(f"p{number}", "a", hung=False)

    assert not resting.may_read(f"p{3 * MOST - 1}", "a")
    assert len(resting._until_s) <= MOST  # noqa: SLF001
    assert len(resting._able) <= MOST  # noqa: SLF001
