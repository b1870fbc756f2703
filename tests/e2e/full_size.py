"""Program that gives vLLM's model class the weights of a generated model, without their values.

It prints the parameters that got no weight. A weight of an unknown name, or of another shape than
its parameter, ends it.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from epd.tools.models import full_size

torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    built = getattr(full_size, sys.argv[1])()
with TemporaryDirectory() as folder:
    built.write_config(Path(folder))
    config = EngineArgs(folder, dtype="bfloat16").create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        initialize_model_parallel()
        with torch.device("meta"):
            model = initialize_model(config)
        loaded = model.load_weights(built.named_weights())
sys.stdout.write(" ".join(sorted({name for name, _ in model.named_parameters()} - loaded)) + "\n")
