"""The path that a reverse proxy has before those of this proxy's routes."""

from aiohttp.http_parser import RawRequestMessage
from yarl import URL


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Return a request for the path below a prefix; a request for another path as it is.

    A reverse proxy may have removed the prefix already. As in vLLM's server (starlette's
    `root_path`), both forms are answered.

    Args:
        message: the request's head.
        prefix: begins with a slash and does not end in one, such as `/vllm`.
    """
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    return message._replace(url=_with_path(message.url, path[len(prefix) :] or "/"))


def _with_path(url: URL, path: str) -> URL:
    return url.with_path(path, encoded=True, keep_query=True, keep_fragment=True)
