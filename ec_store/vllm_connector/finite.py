"""Values that are not finite: one of them in a KV cache spoils the answers of later requests."""

import logging

import numpy as np

from ec_store.counts import Counts
from ec_store.entry import Entry

logger = logging.getLogger("vllm.ec_store")

PIECE_BYTES = 2**18
"""The second pass over a piece finds it in a core's cache."""

INFINITY = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000)}
"""Bytes of a value, and the bits of infinity: NaN has the same exponent and is larger."""


class FiniteOnly:
    """Refuses entries with values that are not finite, counts them, and logs the first one."""

    def __init__(self, counts: Counts, consequence: str) -> None:
        """Refuse nothing yet.

        Args:
            counts: gets `nonfinite`.
            consequence: what becomes of a refused entry, for the log.
        """
        self._counts = counts
        self._consequence = consequence
        self._logged = False

    def __call__(self, entry: Entry) -> bool:
        """Tell whether an entry is accepted."""
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


def is_finite(entry: Entry) -> bool:
    """Tell whether an entry has neither NaN nor infinity, in up to twice its checksum's time.

    Compares bits: numpy has no bfloat16. Read as signed integers, the largest positive value is
    found. Read as unsigned ones, negative values are the largest ones.
    """
    size, infinity = INFINITY[entry.dtype]
    sign = 1 << (8 * size - 1)
    signed = np.frombuffer(entry.data, f"<i{size}")
    unsigned = signed.view(f"<u{size}")
    step = PIECE_BYTES // size
    return all(
        signed[start : start + step].max() < infinity
        and unsigned[start : start + step].max() < sign | infinity
        for start in range(0, len(signed), step)
    )
