"""TLS contexts out of files: certificates, and whose certificates are trusted."""

import ssl
from pathlib import Path


class TlsInvalid(ValueError):
    """A certificate or a key cannot be used. The message quotes nothing of them."""


def upstream_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return what servers are verified with, by name: the given CAs alone, or the system's.

    Raises:
        TlsInvalid: the file cannot be read, or has no certificate in it.
    """
    if ca_file is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    trust(context, "--upstream-ca-file", ca_file)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Have a context show this certificate.

    Raises:
        TlsInvalid: it cannot be used with this key.
    """
    _readable("--ssl-certfile", certificate)
    _readable("--ssl-keyfile", key)
    try:
        # With a passphrase given, even an empty one, OpenSSL does not ask the terminal for it.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # one of them may have gone since
        raise TlsInvalid(
            f"--ssl-certfile {certificate} with --ssl-keyfile {key}: {_said(error)}"
        ) from None


def trust(context: ssl.SSLContext, flag: str, certificates: Path) -> None:
    """Have a context trust these CAs, which a flag has named.

    Raises:
        TlsInvalid: the file cannot be read, or has no certificate in it.
    """
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
