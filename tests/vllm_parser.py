"""vLLM's own command-line parser."""

import json
import os
import subprocess
import sys

PARSER = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for argv in json.load(sys.stdin):
    args, unknown = parser.parse_known_args(argv)
    print(json.dumps([unknown, args.ec_transfer_config and args.ec_transfer_config.ec_role,
        args.kv_transfer_config and args.kv_transfer_config.kv_role, args.enforce_eager,
        args.enable_prefix_caching, args.tensor_parallel_size, args.gpu_memory_utilization,
        args.enable_request_id_headers, args.max_num_batched_tokens]))
"""


def parsed(argvs: list[list[str]]) -> list[list[object]]:
    """Return what vLLM's own parser makes of each command line."""
    ran = subprocess.run(
        [sys.executable, "-c", PARSER],
        input=json.dumps(argvs),
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[[")]
