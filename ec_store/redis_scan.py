"""What goes over all keys of a store in Redis."""

from collections.abc import Iterator

from ec_store.errors import CorruptEntry
from ec_store.redis_client import RedisClient
from ec_store.redis_layout import FRAME_BYTES, Frame, Names, chunk_owner, manifest_digest

BATCH = 512
"""Keys that SCAN looks at in one go: some 0.1 ms, in which Redis serves nobody else."""


def scanned(client: RedisClient, names: Names) -> Iterator[list[str]]:
    """The digests of all entries, in batches, each once."""
    seen: set[str] = set()
    for found in _scan(client, names.manifests):
        digests = {digest for name in found if (digest := manifest_digest(name))} - seen
        seen |= digests
        if digests:
            yield list(digests)


def orphans(client: RedisClient, names: Names, staging_ms: int) -> Iterator[list[bytes]]:
    """The names of chunks that no manifest names and no writer is about to, in batches."""
    for found in _scan(client, names.all_chunks):
        owners = {name: owner for name in found if (owner := chunk_owner(name))}
        left = dict(zip(owners, client.run([("PTTL", name) for name in owners]), strict=True))
        # A chunk without a manifest is written with a short time to live, and gets a long one in
        # the same go as its manifest.
        settled = {name: owners[name] for name in owners if not 0 <= left[name] <= staging_ms}
        digests = list({digest for digest, _ in settled.values()})
        heads = client.run(
            [("GETRANGE", names.manifest(digest), 0, FRAME_BYTES - 1) for digest in digests]
        )
        writes = {digest: _write_id(head) for digest, head in zip(digests, heads, strict=True)}
        unnamed = [
            name for name, (digest, write_id) in settled.items() if writes[digest] != write_id
        ]
        if unnamed:
            yield unnamed


def _scan(client: RedisClient, pattern: bytes) -> Iterator[list[bytes]]:
    rest = ("MATCH", pattern, "COUNT", BATCH)
    for node, first in client.each_master(("SCAN", 0, *rest)):
        reply = first
        yield reply[1]
        while int(reply[0]):
            reply = client.ask(node, ("SCAN", reply[0], *rest))
            yield reply[1]


def _write_id(head: bytes) -> bytes | None:
    try:
        return Frame.read(memoryview(head)).write_id
    except CorruptEntry:
        return None
