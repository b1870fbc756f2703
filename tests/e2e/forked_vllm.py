"""Runs `vllm` on the CPU, forked from the fork server, in the network namespace of this process."""

import os
import signal
import sys

from epd.tools.up.engine import FETCHES_ONCE
from epd.tools.up.platforms import CPU, OFFLINE
from scripts.forked import NETWORK, fork_vllm

if __name__ == "__main__":
    environment = {**OFFLINE, **FETCHES_ONCE, **CPU.environment, **os.environ}
    environment[NETWORK] = f"/proc/{os.getpid()}/ns/net"
    bounds = ("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096")
    program = fork_vllm([*sys.argv[1:], *CPU.flags, "--enforce-eager", *bounds], environment, 1)
    signal.signal(signal.SIGTERM, lambda *_: program.send_signal(signal.SIGTERM))
    sys.exit(program.wait())
