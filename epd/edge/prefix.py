"""Path prefix that a reverse proxy puts before the paths of this proxy's routes."""

from aiohttp.http_parser import RawRequestMessage
from yarl import URL


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Return a request's head with the prefix removed from its path.

    A path without the prefix is unchanged: a reverse proxy may have removed it already. As in
    vLLM's server (starlette's `root_path`), both forms are answered.

    Args:
        message: head of the request.
        prefix: prefix with a leading slash and no trailing one, such as `/vllm`.
    """
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    return message._replace(url=_with_path(message.url, path[len(prefix) :] or "/"))


def _with_path(url: URL, path: str) -> URL:
    return url.with_path(path, encoded=True, keep_query=True, keep_fragment=True)
