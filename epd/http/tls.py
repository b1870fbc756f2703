"""TLS: the certificate that clients see, and whose certificates the proxy trusts."""

import ssl
from pathlib import Path
from typing import Literal

from epd.config import ProxyConfig


class TlsInvalid(ValueError):
    """A certificate or a key cannot be used. The message quotes nothing of them."""


def server_context(config: ProxyConfig) -> ssl.SSLContext | None:
    """What clients are served with; None where they are served plain HTTP.

    Raises:
        TlsInvalid: a file cannot be read, is no PEM, or the key is not the certificate's.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        _trust(context, "--ssl-ca-certs", config.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def renew(context: ssl.SSLContext, config: ProxyConfig) -> None:
    """Read certificate and key anew: connections from now on are served with them.

    Raises:
        TlsInvalid: they cannot be used. The context is as it was.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    # A context that is given a wrong key has lost the one it had.
    _load_certificate(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile
    )
    _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)


def upstream_context(ca_file: Path | None) -> ssl.SSLContext | Literal[True]:
    """What instances are verified with, by name: the given CAs alone, or as aiohttp does itself.

    Raises:
        TlsInvalid: the file cannot be read, or has no certificate in it.
    """
    if ca_file is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(context, "--upstream-ca-file", ca_file)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _readable("--ssl-certfile", certificate)
    _readable("--ssl-keyfile", key)
    try:
        # With a passphrase given, even an empty one, OpenSSL does not ask the terminal for it.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # one of them may have gone since
        raise TlsInvalid(
            f"--ssl-certfile {certificate} with --ssl-keyfile {key}: {_said(error)}"
        ) from None


def _trust(context: ssl.SSLContext, flag: str, certificates: Path) -> None:
    _readable(flag, certificates)
    try:
        context.load_verify_locations(certificates)
    except OSError as error:
        raise TlsInvalid(f"{flag} {certificates}: {_said(error)}") from None


def _readable(flag: str, path: Path) -> None:
    """OpenSSL does not say which file it could not read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise TlsInvalid(f"{flag} {path}: {error.strerror}") from None


def _said(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or type(error).__name__
    if error.reason is None:
        return "not a PEM file, or a key with a passphrase"
    return error.reason.lower().replace("_", " ")
