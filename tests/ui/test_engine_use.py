"""Use of the instances' caches, from their pages of metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.ui.engine_use import LOOKED_S, MAX_INSTANCES, NO_USE, EngineUse, EngineUses, read_use
from tests.ui.states import Clock

URL = "http://d:1"


def page(*engines: tuple[float, float, float]) -> bytes:
    """Return a page of metrics with the KV use, prefix queries and prefix hits of each engine."""
    lines = ["# TYPE x gauge"]
    for number, engine in enumerate(engines):
        labels = f'{{engine="{number}",model_name="m"}}'
        names = ("kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total")
        lines += [f"vllm:{name}{labels} {value}" for name, value in zip(names, engine, strict=True)]
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([(0.5, 1000.0, 720.0)], EngineUse(0.5, 0.72)),
        ([(0.2, 100.0, 100.0), (0.6, 300.0, 0.0)], EngineUse(0.4, 0.25)),
        ([(0.0, 0.0, 0.0)], EngineUse(0.0, None)),
        ([], NO_USE),
        ([(1.5, 10.0, 20.0)], NO_USE),
        ([(float("nan"), 10.0, 5.0)], EngineUse(None, 0.5)),
    ],
)
def test_use_is_that_of_all_engines_of_a_page(
    engines: list[tuple[float, float, float]], expected: EngineUse
) -> None:
    assert read_use(page(*engines)) == expected


@given(st.binary() | st.lists(st.tuples(st.floats(), st.floats(), st.floats())))
def test_shares_are_from_0_to_1_or_unknown(found: bytes | list[tuple[float, float, float]]) -> None:
    use = read_use(found if isinstance(found, bytes) else page(*found))

    assert all(share is None or 0 <= share <= 1 for share in use)


def test_pages_are_read_only_while_a_client_looks() -> None:
    clock = Clock()
    uses = EngineUses(clock)
    uses.note_page(URL, page((0.5, 10.0, 5.0)))
    assert uses.of(URL) == NO_USE

    uses.look()
    uses.note_page(URL, page((0.5, 10.0, 5.0)))
    assert uses.of(URL) == EngineUse(0.5, 0.5)

    clock.now_s += LOOKED_S
    uses.note_page(URL, page((0.9, 10.0, 5.0)))
    uses.look()
    assert uses.of(URL) == NO_USE


def test_instances_that_have_left_are_forgotten_while_a_client_looks_all_the_time() -> None:
    uses = EngineUses(Clock())
    uses.look()
    for number in range(MAX_INSTANCES + 1):
        uses.note_page(f"http://d:{number}", page((0.5, 10.0, 5.0)))

    assert uses.of("http://d:0") == NO_USE
    assert uses.of(f"http://d:{MAX_INSTANCES}") != NO_USE
