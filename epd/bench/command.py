"""The `epd bench` command."""

from epd.bench import serve
from epd.parser import Commands


def add_parser(commands: Commands) -> None:
    """Add `bench`, with commands of its own."""
    parser = commands.add_parser("bench", help="measure the proxy, or a fleet", allow_abbrev=False)
    benchmarks = parser.add_subparsers(dest="command", metavar="BENCHMARK", required=True)
    serve.add_parser(benchmarks)
