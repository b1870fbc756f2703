"""Where media items were encoded or loaded last: their encoder outputs may still be there. Pure."""

from collections import Counter
from collections.abc import Sequence

from ec_store.bounded import BoundedDict

BY_CONTENT = ("content", "session")
"""Balances that already send related requests to one instance."""

MAX_ITEMS = 65536
"""Upper bound of the items that are remembered."""


class RecentItems:
    """The last instance of each item, by the item's identity. Belongs to one event loop."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._urls: BoundedDict[str, str] = BoundedDict(max_items)

    def nearest_url(self, identities: Sequence[str]) -> str | None:
        """Return the URL of the instance with the most of these items; None if none is known."""
        known = [url for name in identities if (url := self._urls.get(name)) is not None]
        return Counter(known).most_common(1)[0][0] if known else None

    def record(self, identities: Sequence[str], url: str) -> None:
        """Remember that a request with these items goes to an instance."""
        for name in identities:
            self._urls[name] = url
