"""The file of API keys (`--api-keys-file`)."""

import stat

import structlog

from epd.config.sections import ConfigFields
from epd.tenants import ApiKeys, KeysInvalid, parse_keys


def read_keys(config: ConfigFields, *, warns: bool = False) -> ApiKeys | None:
    """Return the keys in the configured file; None if none is configured.

    With `warns`, log a warning if other users may read or write the file.

    Raises:
        KeysInvalid: the file cannot be read, or is invalid.
    """
    if (path := config.api_keys_file) is None:
        return None
    try:
        keys, mode = parse_keys(path.read_bytes()), path.stat().st_mode
    except OSError as error:
        raise KeysInvalid(f"{path}: {error.strerror}") from None
    except KeysInvalid as error:
        raise KeysInvalid(f"{path}: {error}") from None
    if warns and mode & (stat.S_IROTH | stat.S_IWOTH):
        structlog.get_logger("epd").warning(
            "others may read or write the keys file", path=str(path), mode=f"{mode & 0o777:o}"
        )
    return keys
