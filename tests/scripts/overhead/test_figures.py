import orjson
import pytest

from scripts.overhead.load import BenchLoad, Done
from scripts.overhead.scenarios import DIRECT, SCENARIOS, Result, Sample, sample, table


def turn(cpu_ms: float, first_ms: float = 1.0, failed: int = 0) -> Sample:
    return Sample(cpu_ms, 0.0, 100.0, first_ms, 2 * first_ms, 0.0, 1e8, 10, failed)


RESULT = Result(
    SCENARIOS[0],
    {
        DIRECT: [turn(0.0)] * 3,
        "epd": [turn(1.0, 3.0), turn(2.0, 5.0), turn(9.0, 4.0)],
        "relay": [turn(2.0), turn(2.0, failed=1), turn(3.0, failed=2)],
    },
)


def test_a_ratio_is_the_median_over_rounds_and_not_of_medians() -> None:
    assert RESULT.ratio("epd", "relay") == 1.0  # median of 0.5, 1 and 3
    assert RESULT.median("epd").cpu_ms == 2.0


def test_failed_requests_are_summed() -> None:
    assert RESULT.median("relay").failed == 3


def test_added_latency_excludes_the_latency_of_the_load_alone() -> None:
    assert RESULT.added_ms("epd") == (3.0, 6.0)


def test_a_turns_figures_are_those_of_its_requests() -> None:
    done = [Done(0.001 * n, 0.002 * n, 0.0005 * n, 64) for n in range(1, 102)]
    it = sample(BenchLoad(done, ["closed"], 2.0), 0.5, 7)

    assert it.cpu_ms == pytest.approx(500 / 101)
    assert it.cpu_chunk_us == pytest.approx(500_000 / 101 / 64)
    assert it.rps == pytest.approx(50.5)
    assert (it.first_p50_ms, it.first_p99_ms) == pytest.approx((51.0, 100.0))
    assert it.gap_ms == pytest.approx(50.5)
    assert (it.done, it.failed, it.resident_bytes) == (101, 1, 7)


def test_a_load_of_which_all_failed_has_figures_too() -> None:
    assert sample(BenchLoad([], ["closed"], 1.0), 0.5, 7).done == 0


def test_tables_have_as_many_cells_in_each_line() -> None:
    lines = list(table([RESULT], "epd"))

    assert len({line.count("|") for line in lines}) == 1
    assert "| 2.000 | 2.000 | 1.00 |" in "\n".join(lines)


def test_results_are_json_with_the_ratio_to_each_contender() -> None:
    written = orjson.loads(orjson.dumps(RESULT.json("epd")))

    assert written["scenario"]["name"] == SCENARIOS[0].name
    assert written["contenders"]["relay"]["epd_ratio"] == 1.0
    assert "epd_ratio" not in written["contenders"][DIRECT]
