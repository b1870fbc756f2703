"""Program that calls a store as its standard input says. It runs in any release.

    python store_program.py URL

A line is a JSON array: the method, and its arguments. The answer is a line with the result or the
error. It uses only what docs/compatibility.md promises.
"""

import json
import sys
from typing import Any

from ec_store import Entry, EntryKey, StoreError, open_store


def main(url: str) -> None:
    """Answer each line of standard input."""
    # A store that cannot be opened answers every call with its error.
    calls: Calls | None = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            calls = calls or Calls(url)
            answer = {"result": getattr(calls, method)(*arguments)}
        except StoreError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


class Calls:
    """The calls of a store, with JSON arguments and results."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def put(self, key: list[str], entry: dict[str, Any]) -> bool:
        data = memoryview(bytes.fromhex(entry["data"]))
        written = Entry(
            data, entry["dtype"], tuple(entry["shape"]), entry["modality"], entry["metadata"]
        )
        return self._store.put(EntryKey(*key), written)

    def get(self, key: list[str]) -> dict[str, Any] | None:
        entry = self._store.get(EntryKey(*key))
        if entry is None:
            return None
        return {
            "data": b"".join(entry.parts).hex(),
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "modality": entry.modality,
            "metadata": _plain(entry.metadata),
        }

    def lease(self, key: list[str], seconds: float) -> bool:
        return self._store.lease([EntryKey(*key)], seconds) != [None]

    def claim(self, key: list[str], owner: str, seconds: float) -> bool:
        return self._store.claim([EntryKey(*key)], owner, seconds) == [True]

    def release(self, key: list[str], owner: str) -> None:
        self._store.release([EntryKey(*key)], owner)

    def register_namespace(self, model: str, namespace: str) -> None:
        self._store.register_namespace(model, namespace)

    def namespaces(self) -> dict[str, str]:
        return dict(self._store.namespaces())


def _plain(value: Any) -> Any:
    """Return a read-only JSON value as one that `json` writes."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if hasattr(value, "items"):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value]


if __name__ == "__main__":
    main(sys.argv[1])
