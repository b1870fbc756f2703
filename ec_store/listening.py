"""Flags of `ec-store serve` for proxies of other hosts: an address, a key and a certificate."""

import argparse
import logging
import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ec_store.access import is_loopback
from ec_store.arena.remote import bind_tcp
from ec_store.arena.remote_url import DEFAULT_PORT, KEY_VARIABLE, check_key
from ec_store.errors import StoreUnavailable

ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - to recognise them

logger = logging.getLogger("vllm.ec_store")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate of a server, with its chain and its private key, from two files."""

    certificate: Path
    private_key: Path
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load(self) -> None:
        """Read the files for new connections. Raise ValueError if they cannot be used."""
        # A context of its own first: a key that does not match must not stay in the other.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                # With a passphrase, even an empty one, OpenSSL does not prompt for it.
                context.load_cert_chain(self.certificate, self.private_key, password="")
            except OSError as error:  # ssl.SSLError is one
                reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
                raise ValueError(
                    f"--ssl-certfile {self.certificate} with --ssl-keyfile {self.private_key}: "
                    f"{reason or 'not a PEM file, or a key with a passphrase'}"
                ) from None

    def reload(self) -> None:
        """Read the files again; without usable ones, the old certificate stays."""
        try:
            self.load()
        except ValueError as error:
            logger.warning("%s; the certificate of --listen stays as it was", error)
        else:
            logger.warning("read %s again", self.certificate)


@dataclass(frozen=True, slots=True)
class Listening:
    """Address for proxies of other hosts, with its key and certificate.

    Attributes:
        socket: bound socket, which does not listen yet.
        address: URL by which the proxies reach it.
        key: key that they must have.
        certificate: certificate of the server; None: connections are not encrypted.
    """

    socket: socket.socket
    address: str
    key: str = field(repr=False)
    certificate: Certificate | None = None


def listening(args: argparse.Namespace) -> Listening | None:
    """Return the address in the flags; None without one.

    Raises:
        ValueError: flags contradict each other, or the key or the certificate cannot be used.
        StoreUnavailable: the address cannot be bound.
    """
    if args.listen is None:
        names = ("advertise", "ssl_certfile", "ssl_keyfile")
        if given := [name for name in names if getattr(args, name) is not None]:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --listen")
        return None
    key = os.environ.get(KEY_VARIABLE, "")
    check_key(key)
    host, port = _host_and_port("--listen", args.listen)
    certificate = _certificate(args)
    if certificate is None and not is_loopback(host):
        logger.warning(
            "every host that sees the packets of --listen %s can read the key: set --ssl-certfile "
            "and --ssl-keyfile, or close the network",
            args.listen,
        )
    address = _advertised(args.advertise or args.listen, secure=certificate is not None)
    try:
        bound = bind_tcp(host, port)
    except OSError as error:
        raise StoreUnavailable(f"cannot listen at {args.listen}: {error}") from error
    return Listening(bound, address, key, certificate)


def _certificate(args: argparse.Namespace) -> Certificate | None:
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
    if args.ssl_certfile is None:
        return None
    certificate = Certificate(Path(args.ssl_certfile), Path(args.ssl_keyfile))
    certificate.load()
    return certificate


def _advertised(text: str, *, secure: bool) -> str:
    host, port = _host_and_port("--advertise", text)
    if host in ANY_ADDRESS:
        raise ValueError("--listen at all addresses needs --advertise HOST:PORT for the proxies")
    return f"shm+{'tls' if secure else 'tcp'}://{f'[{host}]' if ':' in host else host}:{port}"


def _host_and_port(flag: str, text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError(f"{flag} must be HOST:PORT, not {text!r}") from None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{flag} must be HOST:PORT, not {text!r}")
    return parts.hostname or "", port
