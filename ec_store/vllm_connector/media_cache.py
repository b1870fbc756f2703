"""vLLM's cache of an engine's preprocessed media: items that come as metadata leave it as it is.

vLLM's frontend sends preprocessed media once, and then their identifier alone: the engine has them
in its cache. An item that comes as metadata has the same identifier, and vLLM 0.32 and 0.33 put it
in the place of the media. A later request with the media would have none, and fail if the store
has lost the entry meanwhile.
"""

import functools
import logging
from collections.abc import Collection
from typing import Any

logger = logging.getLogger("vllm.ec_store")


def has_media(item: Any, placeholder: Collection[str]) -> bool:
    """Return whether an engine can encode an item: it has more than its placeholder's metadata."""
    data = item.get_data()
    return any(value is not None and key not in placeholder for key, value in data.items())


def keep_media(placeholder: Collection[str]) -> None:
    """Let the caches of this process keep media. `placeholder` has the fields of metadata."""
    try:
        from vllm.multimodal.cache import (  # noqa: PLC0415 - a later release may not have it
            LruKeyReplicatedReceiverCache as EngineCache,
        )

        update_item: Any = EngineCache.get_and_update_item
    except (ImportError, AttributeError) as error:
        logger.warning(
            "this release of vLLM is not known here (%s): requests fail if the store loses an "
            "entry and this engine had its media before",
            error,
        )
        return
    update_item = getattr(update_item, "__wrapped__", update_item)  # of an earlier connector

    @functools.wraps(update_item)
    def get_and_update_item(self: EngineCache, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is not None and not has_media(mm_item, placeholder):
            return mm_item
        return update_item(self, mm_item, mm_hash)

    EngineCache.get_and_update_item = get_and_update_item
