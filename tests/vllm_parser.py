"""vLLM's own command-line parser."""

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

import pytest

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: scripts/test.sh installs it"
)


def parsed(argvs: list[list[str]]) -> list[list[object]]:
    """Return what vLLM's own parser makes of each command line."""
    with warnings.catch_warnings(action="ignore"):
        serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
        argparse_utils: Any = importlib.import_module("vllm.utils.argparse_utils")
        parser = argparse_utils.FlexibleArgumentParser()
        serve.ServeSubcommand().subparser_init(parser.add_subparsers())
        return [settings(*parser.parse_known_args(argv)) for argv in argvs]


def settings(args: Any, unknown: list[str]) -> list[object]:
    """Return the unknown flags, and the settings that this project's flags change."""
    return [
        unknown,
        args.ec_transfer_config and args.ec_transfer_config.ec_role,
        args.kv_transfer_config and args.kv_transfer_config.kv_role,
        args.enforce_eager,
        args.enable_prefix_caching,
        args.tensor_parallel_size,
        args.gpu_memory_utilization,
        args.enable_request_id_headers,
        args.max_num_batched_tokens,
    ]
