"""Cooldowns of KV read-back: which prefill instance may not read from which engine, how long."""

from epd.request.kv_readback import HUNG_S, MOST, REST_S, Cooldowns


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_prefill_that_could_not_read_of_one_engine_reads_of_the_others() -> None:
    clock = Clock()
    resting = Cooldowns(clock)
    resting.begin("p", "a", hung=False)

    assert not resting.may_read("p", "a")
    assert resting.may_read("p", "b")
    assert resting.may_read("other", "a")
    clock.now_s += REST_S
    assert resting.may_read("p", "a")


def test_a_prefill_that_hangs_reads_of_no_engine_for_longer() -> None:
    clock = Clock()
    resting = Cooldowns(clock)
    resting.begin("p", "a", hung=True)
    resting.begin("p", "a", hung=False)
    clock.now_s += REST_S

    assert not resting.may_read("p", "a")
    assert not resting.may_read("p", "b")
    assert resting.may_read("other", "a")
    clock.now_s += HUNG_S
    assert resting.may_read("p", "b")


def test_cooldowns_of_removed_instances_are_dropped() -> None:
    resting = Cooldowns(Clock())
    for number in range(3 * MOST):
        resting.begin(f"p{number}", "a", hung=False)

    assert not resting.may_read(f"p{3 * MOST - 1}", "a")
    assert len(resting._until_s) <= MOST  # noqa: SLF001
