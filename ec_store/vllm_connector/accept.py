"""Acceptance checks of fetched entries, with a log message for rejected ones."""

import logging
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.vllm_connector.finite import FiniteOnly
from ec_store.vllm_connector.fit import Expected, misfit

logger = logging.getLogger("vllm.ec_store")


class Target(NamedTuple):
    """Item that an entry is fetched for.

    Attributes:
        identifier: identifier of the item.
        modality: modality of the item.
        expected: dtype and shape that the model needs for it.
    """

    identifier: str
    modality: str
    expected: Expected


class Acceptance:
    """Check that rejects entries of the wrong dtype or shape, or with values that are not finite.

    Thread-safe.
    """

    def __init__(self, counts: Counts) -> None:
        """Create the check.

        Args:
            counts: gets `misfits` and `nonfinite`.
        """
        self._counts = counts
        self._finite = FiniteOnly(counts, "it was fetched and counts as a miss")
        self._logged: set[str] = set()

    def __call__(self, target: Target, entry: Entry) -> bool:
        """Return whether an entry is accepted. Called on the thread that fetched it."""
        return self.fits(target, entry) and self._finite(entry)

    def fits(self, target: Target, entry: Entry) -> bool:
        """Return whether dtype and shape fit the item. Cheap: the values are not read."""
        found = misfit(entry, target.expected)
        if found is None:
            return True
        self._counts.add(misfits=1)
        if found.kind not in self._logged:
            self._logged.add(found.kind)
            logger.warning(
                "an encoder cache entry does not fit the model and counts as a miss: "
                "identifier %.128r, modality %s, %s: found %s, expected %s. Further ones are only "
                "counted, in vllm:ec_store_misfits_total. If other engines of this model write "
                "such entries, compare their vLLM release, dtype and model; then remove the "
                "entries with `ec-store purge --namespace`.",
                target.identifier,
                target.modality,
                *found,
            )
        return False
