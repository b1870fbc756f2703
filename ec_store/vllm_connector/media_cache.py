"""vLLM's cache of an engine's preprocessed media: items that come as metadata leave it as it is.

vLLM's frontend sends preprocessed media once, and then their identifier alone: the engine has them
in its cache. An item that comes as metadata has the same identifier, and vLLM 0.32 and 0.33 put it
in the place of the media. A later request with the media would have none, and fail if the store
has lost the entry meanwhile.
"""

from collections.abc import Collection
from typing import Any

from vllm.multimodal.cache import LruKeyReplicatedReceiverCache as EngineCache

_update_item = EngineCache.get_and_update_item


def has_media(item: Any, placeholder: Collection[str]) -> bool:
    """Return whether an engine can encode an item: it has more than its placeholder's metadata."""
    data = item.get_data()
    return any(value is not None and key not in placeholder for key, value in data.items())


def keep_media(placeholder: Collection[str]) -> None:
    """Let the caches of this process keep media. `placeholder` has the fields of metadata."""

    def get_and_update_item(cache: EngineCache, item: Any, name: str) -> Any:
        if item is not None and not has_media(item, placeholder):
            return item
        return _update_item(cache, item, name)

    EngineCache.get_and_update_item = get_and_update_item
