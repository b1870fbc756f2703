"""Whose request it is: API keys, the tenants they belong to, and what tenants share.

Keys are known by their SHA-256 alone, here and in the file they are listed in.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINE = re.compile(rf"({NAME.pattern})\s*:\s*([0-9A-Fa-f]{{64}})")
KEY = re.compile(r"[!-~]{16,512}")
"""What a key may be: an Authorization header carries it, and nobody guesses it."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever keys belong to. Several keys may be one tenant's."""

    name: str

    def __hash__(self) -> int:
        """The name's, which Python remembers: who has how much is looked up several times each."""
        return hash(self.name)


ANONYMOUS = Tenant("")
"""Everybody, where no keys are configured. No line of a keys file can name it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a request's keys and salts are derived under: equal scopes share cache entries.

    Attributes:
        tenant: None where all tenants share.
        secret: known to the proxies alone; it may be empty.
    """

    tenant: Tenant | None = None
    secret: bytes = field(default=b"", repr=False)


class KeysInvalid(ValueError):
    """A keys file cannot be used. The message quotes nothing of it: it could be a key."""


class ApiKeys:
    """The known keys, by their SHA-256."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)

    def replace(self, others: "ApiKeys") -> None:
        """Know those keys from now on, and no longer these."""
        self._tenants = others._tenants  # noqa: SLF001 - of this class

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None if the key is unknown.

        The key is looked up by its digest, so the cost does not depend on how many keys are known.
        How long the lookup takes may depend on the digest. It tells nothing about the known keys:
        a client cannot choose the digest of what it presents, only the text that is hashed.
        """
        return self._tenants.get(_sha256(key))


def parse_keys(raw: bytes) -> ApiKeys:
    """The keys of a keys file: lines `tenant:sha256`; `#` starts a comment line.

    Raises:
        KeysInvalid: a line is something else or repeats a key, or there is no key at all.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        stripped = line.decode("utf-8", "replace").strip()
        if not stripped or stripped.startswith("#"):
            continue
        parsed = LINE.fullmatch(stripped)
        if parsed is None:
            raise KeysInvalid(
                f"line {number} is not tenant:sha256 as `epd hash-key` prints it "
                "(a tenant's name has up to 64 of A-Z a-z 0-9 . _ -)"
            )
        key = bytes.fromhex(parsed[2])
        if key in tenants:
            raise KeysInvalid(f"line {number} repeats the key of a line above")
        tenants[key] = Tenant(parsed[1])
    if not tenants:
        raise KeysInvalid("there is no key in it")
    return ApiKeys(tenants)


def new_key() -> str:
    """A key that nobody can guess: 256 random bits."""
    return f"epd-{secrets.token_urlsafe(32)}"


def key_line(tenant: str, key: str) -> str:
    """The line of a keys file that makes `key` one of the tenant's.

    Raises:
        ValueError: the tenant's name or the key is not what such a line can hold.
    """
    if NAME.fullmatch(tenant) is None:
        raise ValueError("a tenant's name has up to 64 of A-Z a-z 0-9 . _ -")
    if KEY.fullmatch(key) is None:
        raise ValueError("a key has 16 to 512 printable ASCII characters and no space")
    return f"{tenant}:{_sha256(key).hex()}"


def _sha256(key: str) -> bytes:
    # A header's bytes that are not UTF-8 come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
