"""TLS contexts from files: certificates, and trusted CAs."""

import ssl
from pathlib import Path


class TlsInvalid(ValueError):
    """A certificate or a key is invalid. The message quotes no part of them."""


def upstream_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that verifies servers by name: with the given CAs, or else the system's.

    Raises:
        TlsInvalid: the file cannot be read, or has no certificate in it.
    """
    if ca_file is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    trust_cas(context, "--upstream-ca-file", ca_file)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Add a certificate with its key to a context. Raise `TlsInvalid` if they cannot be used."""
    _readable("--ssl-certfile", certificate)
    _readable("--ssl-keyfile", key)
    try:
        # With a passphrase, even an empty one, OpenSSL does not prompt for it on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # a file may have been removed since the check
        raise TlsInvalid(
            f"--ssl-certfile {certificate} with --ssl-keyfile {key}: {_error_text(error)}"
        ) from None


def trust_cas(context: ssl.SSLContext, flag: str, certificates: Path) -> None:
    """Add trusted CAs from the file of a flag to a context.

    Raises:
        TlsInvalid: the file cannot be read, or has no certificate in it.
    """
    _readable(flag, certificates)
    try:
        context.load_verify_locations(certificates)
    except OSError as error:
        raise TlsInvalid(f"{flag} {certificates}: {_error_text(error)}") from None


def _readable(flag: str, path: Path) -> None:
    """Raise an error that names the file; OpenSSL does not."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise TlsInvalid(f"{flag} {path}: {error.strerror}") from None


def _error_text(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or type(error).__name__
    if error.reason is None:
        return "not a PEM file, or a key with a passphrase"
    return error.reason.lower().replace("_", " ")
