"""Let a torchvision built for CUDA be imported next to a CPU build of torch.

Its compiled operators cannot be loaded there, and `import torchvision` then dies because it
registers a fake `torchvision::nms` that nobody defined. The multimodal processors only need its
Python side, so declaring the two operators, without an implementation, is enough.

`adapt_vllm_cpu.py` copies this file into a virtual environment, with a `.pth` file that imports it
at the start of every Python process: vLLM spawns its engines, so no patch made in one process
reaches the next.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.library import Library

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def operators() -> "Library":
    """The library that declares them; cached because they vanish with it, and fit only once."""
    # Imported late: this module is loaded by processes that never touch torch.
    from torch.library import Library  # noqa: PLC0415

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + SCHEMA)
    return library


class Loader(SourceFileLoader):
    """Loads torchvision with its operators declared."""

    def exec_module(self, module: ModuleType) -> None:
        """Declare the operators, then run the package."""
        operators()
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds torchvision, and nothing else; looking for it costs no import of torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torchvision's usual spec with our loader."""
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
