"""Forward proxies of the environment: `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`."""

from collections.abc import Mapping
from urllib.request import getproxies_environment

from yarl import URL


class ProxyInvalid(Exception):
    """A variable of the environment is not the URL of a proxy. The text names the variable."""


def forward_proxies() -> Mapping[str, URL]:
    """Return the proxy for each scheme, with its credentials.

    aiohttp's own `trust_env` would also send credentials of `~/.netrc` to origins.

    Raises:
        ProxyInvalid: a proxy of the environment cannot be used.
    """
    proxies = getproxies_environment()
    return {
        scheme: _parsed(scheme, proxies[scheme]) for scheme in proxies.keys() & {"http", "https"}
    }


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
