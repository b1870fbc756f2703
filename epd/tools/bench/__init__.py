"""Command `epd bench`: benchmarks of a fleet."""

from epd.parser import Commands
from epd.tools.bench import serve
from epd.tools.bench.compare import command as compare


def add_parser(commands: Commands) -> None:
    """Add `bench`, with its subcommands."""
    summary = "measure a fleet, or compare fleets with plain vLLM"
    parser = commands.add_parser("bench", help=summary, description=summary)
    benchmarks = parser.add_subparsers(dest="command", metavar="BENCHMARK", required=True)
    serve.add_parser(benchmarks)
    compare.add_parser(benchmarks)
