"""Files of keys and certificates: read at the start, and again at SIGHUP."""

import stat
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from epd.config.sections import ConfigFields
from epd.edge.listening import reload_certificate, server_context
from epd.http.tls import TlsInvalid, upstream_context
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


class Files:
    """Content of the files as they were last valid.

    The first process of several reads them too. So a worker that replaces another, a fork of it,
    has the same as the other workers, even if the files have changed since.

    Attributes:
        keys: API keys; None without a file of them.
        tls: TLS context for clients; None without a certificate.
        upstream_tls: TLS context for instances.
    """

    def __init__(self, config: ConfigFields) -> None:
        """Read the files.

        Raises:
            KeysInvalid: the file of keys cannot be used.
            TlsInvalid: a certificate, a key or a CA cannot be used.
        """
        self._config = config
        self.keys = read_keys(config, warns=True)
        self.tls = server_context(config)
        self.upstream_tls = upstream_context(config.upstream_ca_file)

    def reload(self, *, warns: bool = True) -> Mapping[str, str]:
        """Read keys and certificate again, for new requests and connections.

        Return the reason for each that is invalid, and keeps its content; empty for a success.
        """
        steps: dict[str, Callable[[], None]] = {}
        if self.keys is not None:
            steps["API keys"] = partial(self._renew_keys, self.keys, warns=warns)
        if self.tls is not None:
            steps["certificate"] = partial(reload_certificate, self.tls, self._config)
        reasons = dict.fromkeys(steps, "")
        for what, step in steps.items():
            try:
                step()
            except (KeysInvalid, TlsInvalid) as error:
                reasons[what] = str(error)
        return reasons

    def _renew_keys(self, keys: ApiKeys, *, warns: bool) -> None:
        if (others := read_keys(self._config, warns=warns)) is not None:
            keys.replace(others)
