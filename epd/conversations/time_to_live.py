"""The warning about a time to live of conversations that exceeds that of decode's blocks."""

import structlog

from epd.config import ProxyConfig
from epd.transfer.readback import BLOCKS_TTL_S


def warn_of(config: ProxyConfig, before: ProxyConfig | None = None) -> None:
    """Warn if conversations live longer than decode's blocks by default.

    Args:
        config: new configuration.
        before: previous configuration, to avoid a repeated warning; None at the start.
    """
    ttl_s = config.conversation_ttl
    if ttl_s < BLOCKS_TTL_S or (before is not None and before.conversation_ttl == ttl_s):
        return
    structlog.get_logger("epd").warning(
        "conversations are kept for longer than decode instances keep their blocks by default",
        conversation_ttl=ttl_s,
        next=f"choose less than {BLOCKS_TTL_S:g}, or give decode a decoder_kv_blocks_ttl above "
        "it by more than 5",
    )
