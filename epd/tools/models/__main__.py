"""Program that writes a generated model: `python -m epd.tools.models NAME FOLDER`.

The weights are drawn on a GPU if PyTorch finds one. Those of `qwen2.5-vl-7b` take 16.6 GB,
those of `qwen3-vl-8b` 17.5 GB.
"""

import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from epd.tools.models import GENERATED

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # contexts delete what they wrote
    name, target = sys.argv[1], Path(sys.argv[2])
    module, _, function = GENERATED[name].partition(".")
    torch.set_default_dtype(torch.bfloat16)
    # A reader sees a whole model or none.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as staging:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = getattr(import_module(f"epd.tools.models.{module}"), function)()
        model.write(Path(staging) / target.name)
        (Path(staging) / target.name).rename(target)
