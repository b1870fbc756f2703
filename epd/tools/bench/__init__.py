"""Command `epd bench`: benchmarks of the proxy's own cost, and of a fleet behind it."""

from epd.parser import Commands
from epd.tools.bench import overhead, plot, serve


def add_parser(commands: Commands) -> None:
    """Add `bench`, with its subcommands."""
    summary = "measure the proxy, or a fleet"
    parser = commands.add_parser("bench", help=summary, description=summary)
    benchmarks = parser.add_subparsers(dest="command", metavar="BENCHMARK", required=True)
    overhead.add_parser(benchmarks)
    plot.add_parser(benchmarks)
    serve.add_parser(benchmarks)
