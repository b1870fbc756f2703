"""TLS for clients: the proxy's certificate, and the verification of clients' certificates."""

import ssl

from epd.config import ProxyConfig
from epd.http.tls import load_certificate, trust


def server_context(config: ProxyConfig) -> ssl.SSLContext | None:
    """Return the TLS context for clients; None for plain HTTP.

    Raises:
        TlsInvalid: a file cannot be read, is not PEM, or the key does not match the certificate.
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
    """Reload certificate and key into the context, for new connections.

    Raises:
        TlsInvalid: certificate or key is invalid. The context is unchanged.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    # Check in a new context first: a failed load removes the old key from a context.
    load_certificate(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile
    )
    load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
