"""Tenants: their API keys, and the scope within which they share cache entries.

The proxy stores only the SHA-256 of a key, in memory as in the keys file.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINE = re.compile(rf"({NAME.pattern})\s*:\s*([0-9A-Fa-f]{{64}})")
KEY = re.compile(r"[!-~]{16,512}")
"""Valid keys: an Authorization header can carry them, and they are too long to guess."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of one or more API keys."""

    name: str

    def __hash__(self) -> int:
        # A str caches its hash, and each request looks up its tenant several times.
        return hash(self.name)


ANONYMOUS = Tenant("")
"""The tenant of every client if no keys are configured. No line of a keys file can name it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope in which a request's keys and salts are derived: equal scopes share cache entries.

    Attributes:
        tenant: None if all tenants share entries.
        secret: known to the proxies alone; may be empty.
    """

    tenant: Tenant | None = None
    secret: bytes = field(default=b"", repr=False)


class KeysInvalid(ValueError):
    """A keys file is invalid. The message quotes no part of the file, which could be a key."""


class ApiKeys:
    """The valid keys, by their SHA-256."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)

    def replace(self, others: "ApiKeys") -> None:
        self._tenants = others._tenants  # noqa: SLF001 - of this class

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None for an unknown key.

        The lookup uses the digest, so its cost does not depend on the number of keys. Its duration
        may depend on the digest but reveals nothing about the valid keys: a client chooses only the
        text that is hashed, not the digest.
        """
        return self._tenants.get(_sha256(key))


def parse_keys(raw: bytes) -> ApiKeys:
    """Parse a keys file: lines `tenant:sha256`; `#` starts a comment line.

    Raises:
        KeysInvalid: a line is invalid or repeats a key, or the file has no key.
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
        raise KeysInvalid("the file has no key; add a line that `epd hash-key` prints")
    return ApiKeys(tenants)


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return f"epd-{secrets.token_urlsafe(32)}"


def key_line(tenant: str, key: str) -> str:
    """Return the line of a keys file that assigns `key` to the tenant.

    Raises:
        ValueError: the tenant's name or the key is invalid.
    """
    if NAME.fullmatch(tenant) is None:
        raise ValueError("a tenant's name has up to 64 of A-Z a-z 0-9 . _ -")
    if KEY.fullmatch(key) is None:
        raise ValueError("a key has 16 to 512 printable ASCII characters and no space")
    return f"{tenant}:{_sha256(key).hex()}"


def _sha256(key: str) -> bytes:
    # Header bytes that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
