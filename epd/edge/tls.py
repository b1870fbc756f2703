"""The certificate that clients see, and what theirs are verified with."""

import ssl

from epd.config import ProxyConfig
from epd.http.tls import load_certificate, trust


def server_context(config: ProxyConfig) -> ssl.SSLContext | None:
    """What clients are served with; None where they are served plain HTTP.

    Raises:
        TlsInvalid: a file cannot be read, is no PEM, or the key is not the certificate's.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        trust(context, "--ssl-ca-certs", config.ssl_ca_certs)
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
    load_certificate(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile
    )
    load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
