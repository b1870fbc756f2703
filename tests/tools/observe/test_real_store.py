import random
from pathlib import Path

from ec_store import EntryKey, open_store
from epd.tools.observe.lru_cache import LruCache
from tests.ec_store.entries import entry

ENTRY_BYTES = 32 * 1024
ENTRIES = 40


def test_the_prediction_is_what_a_store_answers(tmp_path: Path) -> None:
    numbers = random.Random(3)  # noqa: S311 - a test
    trace = [int(200 * numbers.random() ** 2) for _ in range(600)]
    quota = ENTRIES * ENTRY_BYTES
    store = open_store(f"file://{tmp_path}/store?max_bytes={quota}")
    output = entry(shape=(ENTRY_BYTES // 2 - 2048, 1))  # with room for its header
    cache = LruCache(quota)
    hits = predicted = 0
    for item in trace:
        key = EntryKey("m", f"{item}")
        if store.get(key) is None:
            store.put(key, output)
        else:
            hits += 1
        predicted += cache.refer(item, ENTRY_BYTES, (None, 0)) is not None
    store.close()

    assert 0.1 < hits / len(trace) < 0.9
    assert abs(predicted - hits) / len(trace) <= 0.03, (predicted, hits)
