"""Base URLs of instances, as they are written everywhere."""

from ipaddress import ip_address
from urllib.parse import SplitResult, parse_qsl, urlsplit

from epd.http.http1 import http_url

DNS_PORT = 53

REDIS_PARAMETERS = {
    "redis": frozenset({"key"}),
    "rediss": frozenset({"key", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}),
}
"""What the URL of a store in Redis may say, by its scheme: others would fail when it is
used, or hold a password where nobody looks for one."""


def base_url(url: str) -> str:
    """A base URL such as `http://host:8001`, its host in lower case and no slash at its end.

    Raises:
        ValueError: it is none. The message quotes no password.
    """
    if "@" in url:
        raise ValueError("must be a URL without a user and a password")
    if any(character <= " " for character in url):
        raise ValueError(f"{url!r} has white space in it")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://host:8001")
    if parts.query or parts.fragment:
        raise ValueError(f"{parts.netloc!r} must be a base URL: no query, no fragment")
    _ = parts.port  # raises ValueError when it is none
    written = f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/")
    try:
        http_url(written)  # `urlsplit` takes hosts that the HTTP client refuses
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL such as http://host:8001: {error}") from None
    return written


def service_url(service: str) -> str:
    """A base URL of what is written as one or as `host:port`, for which it is `http`.

    Raises:
        ValueError: it is neither.
    """
    if "://" in service:
        return base_url(service)
    url = base_url(f"http://{service}")
    if not urlsplit(url).port:
        raise ValueError(f"{service!r} is neither host:port nor a URL such as http://host:8001")
    return url


def at_address(url: str, address: str) -> str:
    """The same URL with an address in place of its host."""
    parts = urlsplit(url)
    host = f"[{address}]" if ip_address(address).version == 6 else address  # noqa: PLR2004
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def zmq_address(address: str) -> str:
    """Where something is pushed to: `tcp://host:port`.

    Raises:
        ValueError: it is no such thing.
    """
    parts = urlsplit(address)
    plain = address == f"tcp://{parts.netloc}" and "@" not in address
    if not plain or not parts.hostname or not parts.port or any(c <= " " for c in address):
        raise ValueError(f"{address!r} is not an address such as tcp://host:19019")
    return address


def is_address(host: str) -> bool:
    """Whether a host is an address, and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def name_server(server: str) -> tuple[str, int]:
    """Address and port of a DNS server, written as `address` or `address:port`.

    Raises:
        ValueError: it is neither.
    """
    try:
        return str(ip_address(server.strip("[]"))), DNS_PORT
    except ValueError:
        parts = urlsplit(f"//{server}")
        return str(ip_address(parts.hostname or "")), parts.port or DNS_PORT


def registration_store_url(url: str) -> str:
    """A URL of a store.

    Raises:
        ValueError: it is none. The message quotes nothing of it: it may hold a password.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        if parts.query or parts.fragment:
            raise ValueError("a folder's URL has no parameters")
        return url
    if parts.scheme in REDIS_PARAMETERS and parts.hostname:
        _check_redis(parts)
        return url
    raise ValueError("must be file:///a/folder, redis://host:6379 or rediss://host:6379")


def conversation_store_url(url: str) -> str:
    """A URL of a store.

    Raises:
        ValueError: it is none. The message quotes nothing of it: it may hold a password.
    """
    parts = urlsplit(url)
    if parts.scheme in REDIS_PARAMETERS and parts.hostname:
        _check_redis(parts)
        return url
    raise ValueError("must be memory, redis://host:6379 or rediss://host:6379")


def _check_redis(parts: SplitResult) -> None:
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("its port is none") from None
    known = REDIS_PARAMETERS[parts.scheme]
    wrong = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - known
    if wrong:
        raise ValueError(f"unknown parameter {min(wrong)!r}; known: {', '.join(sorted(known))}")
