"""Acceptance checks of fetched entries: dtype, rows, columns and finite values.

vLLM merges encoder outputs into the embeddings of a step. A tensor of another shape raises in the
worker, which ends the engine, and so does one that is missing after the scheduler has planned with
it. So the scheduler's process checks everything before a step is built. Values that are not finite
are rejected because one of them in a KV cache corrupts later answers. A rejected entry is counted,
and the first one of each kind is logged.
"""

import logging
from typing import NamedTuple

import numpy as np

from ec_store.arena.store import PlacedEntry
from ec_store.counts import Counts
from ec_store.entry import HeldEntry

logger = logging.getLogger("vllm.ec_store")

PIECE_BYTES = 2**18
"""Bytes of one piece: the second pass over it finds it in a core's cache."""

INFINITY = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000)}
"""Bytes of a value, and the bits of infinity: NaN has the same exponent and is larger."""


class FiniteOnly:
    """Check that rejects entries with values that are not finite, and counts them as `nonfinite`.

    The first one is logged, with its `consequence`: a clause that states what happens to it.
    """

    def __init__(self, counts: Counts, consequence: str) -> None:
        self._counts = counts
        self._consequence = consequence
        self._logged = False

    def __call__(self, entry: HeldEntry) -> bool:
        if is_finite(entry):
            return True
        self._counts.add(nonfinite=1)
        if not self._logged:
            self._logged = True
            logger.warning(
                "an encoder output has NaN or infinite values, modality %s, dtype %s, shape %s: "
                "%s. Further ones are only counted, in vllm:ec_store_nonfinite_total. In float16 "
                "an encoder may overflow: use bfloat16.",
                entry.modality,
                entry.dtype,
                entry.shape,
                self._consequence,
            )
        return False


def is_finite(entry: HeldEntry) -> bool:
    """Return whether an entry has neither NaN nor infinity.

    The check takes up to twice the time of the checksum. It compares bits, because numpy has no
    bfloat16. Read as signed integers, positive values that are not finite are the largest. Read as
    unsigned integers, negative ones are.
    """
    size, infinity = INFINITY[entry.dtype]
    sign = 1 << (8 * size - 1)
    step = PIECE_BYTES // size
    for part in entry.parts:
        signed = np.frombuffer(part, f"<i{size}")
        unsigned = signed.view(f"<u{size}")
        for start in range(0, len(signed), step):
            if signed[start : start + step].max() >= infinity:
                return False
            if unsigned[start : start + step].max() >= sign | infinity:
                return False
    return True


class ItemTarget(NamedTuple):
    """Item that an entry is fetched for, and the tensor that the model needs for it.

    Attributes:
        dtype: dtype of the tensor, as `Entry.dtype`.
        rows: number of the item's tokens.
        columns: number of columns; None if unknown.
    """

    identifier: str
    modality: str
    dtype: str
    rows: int
    columns: int | None


class Misfit(NamedTuple):
    """Reason why an entry is not loaded, with its value and the one that the model needs."""

    kind: str
    found: object
    expected: object


def find_misfit(entry: HeldEntry, target: ItemTarget) -> Misfit | None:
    """Return why an entry cannot be loaded; None if it fits."""
    if entry.dtype != target.dtype:
        return Misfit("dtype", entry.dtype, target.dtype)
    if len(entry.shape) != 2:  # noqa: PLR2004 - rows and columns
        return Misfit("dimensions", len(entry.shape), 2)
    rows, columns = entry.shape
    if rows != target.rows:
        return Misfit("rows", rows, target.rows)
    if columns != target.columns:
        return Misfit("columns", columns, target.columns or "unknown")
    return None


class Acceptance:
    """Check that rejects entries of the wrong dtype or shape, or with values that are not finite.

    They are counted as `misfits` and `nonfinite`. Thread-safe.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._finite = FiniteOnly(counts, "it was fetched and counts as a miss")
        self._logged: set[str] = set()

    def __call__(self, target: ItemTarget, entry: HeldEntry) -> bool:
        """Return whether the entry is accepted. Called on the thread that fetched it.

        The values of an entry in the host's memory are not read here: its producer has read them
        there before it stored the entry.
        """
        return self.accepts_entry(target, entry) and (
            isinstance(entry, PlacedEntry) or self._finite(entry)
        )

    def accepts_entry(self, target: ItemTarget, entry: HeldEntry) -> bool:
        """Return whether dtype and shape fit the item. Cheap: the values are not read."""
        found = find_misfit(entry, target)
        if found is None:
            return True
        self._counts.add(misfits=1)
        if found.kind not in self._logged:
            self._logged.add(found.kind)
            logger.warning(
                "an encoder store entry does not fit the model and counts as a miss: "
                "identifier %.128r, modality %s, %s: found %s, expected %s. Further ones are only "
                "counted, in vllm:ec_store_misfits_total. If other engines of this model write "
                "such entries, compare their vLLM release, dtype and model; then remove the "
                "entries with `ec-store purge --namespace`.",
                target.identifier,
                target.modality,
                *found,
            )
        return False
