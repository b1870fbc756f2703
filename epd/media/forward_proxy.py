"""Forward proxies of the environment: `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`."""

from urllib.request import getproxies_environment, proxy_bypass

from yarl import URL


class ProxyInvalid(Exception):
    """A variable of the environment is not the URL of a proxy. The text names the variable."""


def forward_proxy(url: URL) -> URL | None:
    """Return the proxy for a URL, with its credentials; None for a direct connection.

    aiohttp's own `trust_env` would also send credentials of `~/.netrc` to origins.

    Raises:
        ProxyInvalid: the proxy's URL is invalid.
    """
    proxies = getproxies_environment()
    host = f"{(url.host_subcomponent or '').rstrip('.')}:{url.port}"
    if url.scheme not in proxies or proxy_bypass(host):
        return None
    return _parsed(url.scheme, proxies[url.scheme])


def check_proxies() -> None:
    """Raise `ProxyInvalid` if a proxy of the environment cannot be used."""
    proxies = getproxies_environment()
    for scheme in proxies.keys() & {"http", "https"}:
        _parsed(scheme, proxies[scheme])


def _parsed(scheme: str, text: str) -> URL:
    try:
        proxy = URL(text if "://" in text else f"http://{text}")
    except ValueError:
        proxy = URL()
    if proxy.scheme not in {"http", "https"} or not proxy.host:
        # The text may contain a password.
        raise ProxyInvalid(
            f"--media-fetch-trust-env: {scheme.upper()}_PROXY must be a URL such as "
            "http://proxy:3128"
        )
    return proxy
