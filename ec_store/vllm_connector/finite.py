"""Rejection of values that are not finite: one in a KV cache corrupts later answers."""

import logging

import numpy as np

from ec_store.counts import Counts
from ec_store.entry import Entry

logger = logging.getLogger("vllm.ec_store")

PIECE_BYTES = 2**18
"""Bytes of one piece: the second pass over it finds it in a core's cache."""

INFINITY = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000)}
"""Bytes of a value, and the bits of infinity: NaN has the same exponent and is larger."""


class FiniteOnly:
    """Check that rejects, counts and logs entries with values that are not finite.

    Only the first one is logged.
    """

    def __init__(self, counts: Counts, consequence: str) -> None:
        """Create the check.

        Args:
            counts: gets `nonfinite`.
            consequence: clause of the log message that states what happens to a rejected entry.
        """
        self._counts = counts
        self._consequence = consequence
        self._logged = False

    def __call__(self, entry: Entry) -> bool:
        """Return whether an entry is accepted."""
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
    """Return whether an entry has neither NaN nor infinity.

    The check takes up to twice the time of the checksum. It compares bits, because numpy has no
    bfloat16. Read as signed integers, positive values that are not finite are the largest. Read as
    unsigned integers, negative ones are.
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
