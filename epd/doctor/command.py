"""`epd doctor`."""

import asyncio
import sys

from epd.config import ProxyConfig
from epd.doctor.examination import examine
from epd.doctor.findings import Verdict, as_json, as_text, worst


def run(config: ProxyConfig, *, requests: bool, as_document: bool) -> None:
    """Print the findings. Exits with 1 where requests would suffer."""
    findings = asyncio.run(examine(config, requests=requests))
    print(as_json(findings) if as_document else as_text(findings))
    if worst(findings) is Verdict.FAIL:
        sys.exit(1)
