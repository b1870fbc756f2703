"""`epd hash-key`: a line for the file of API keys."""

import sys
from functools import partial

from epd.parser import Commands, Parser
from epd.tenants import key_line, new_key


def add_parser(commands: Commands) -> None:
    """Add `hash-key` to the commands of `epd`."""
    parser = commands.add_parser(
        "hash-key",
        help="make an API key, or hash one",
        description="Print a line for --api-keys-file. The file holds only hashes: a new key is "
        "shown once, on stderr.",
        epilog="example: epd hash-key alice >> keys",
    )
    parser.add_argument("tenant", metavar="TENANT", help="tenant of the key")
    parser.add_argument(
        "--stdin", action="store_true", help="hash the key in the first line of stdin"
    )
    parser.set_defaults(run=partial(_hash_key, parser))


def _hash_key(parser: Parser, tenant: str, *, stdin: bool) -> None:
    try:
        key = sys.stdin.readline().strip() if stdin else new_key()
        line = key_line(tenant, key)
    except ValueError as error:
        parser.error(str(error))
    if not stdin:
        print(key, file=sys.stderr)
    print(line)
