"""Access to the services of a store over the network: their key, and addresses of this host."""

import hmac
from ipaddress import ip_address


def is_key(key: str, text: str) -> bool:
    """Return whether a text is the key, in a time that tells nothing about either."""
    # Digests of one length: comparing the keys themselves could reveal their length. A header that
    # is not UTF-8 comes with surrogates.
    digests = [
        hmac.digest(b"", each.encode(errors="surrogateescape"), "sha256") for each in (key, text)
    ]
    return hmac.compare_digest(*digests)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
