"""Command `epd bench`: the benchmark of a fleet."""

from epd.parser import Commands
from epd.tools.bench import serve


def add_parser(commands: Commands) -> None:
    """Add `bench`, with its subcommands."""
    summary = "measure a fleet"
    parser = commands.add_parser("bench", help=summary, description=summary)
    benchmarks = parser.add_subparsers(dest="command", metavar="BENCHMARK", required=True)
    serve.add_parser(benchmarks)
