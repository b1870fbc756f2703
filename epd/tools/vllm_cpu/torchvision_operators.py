"""Import hook that makes a CUDA build of torchvision importable with a CPU build of torch.

The compiled operators of such a torchvision cannot be loaded. `import torchvision` then fails,
because it registers a fake `torchvision::nms` without a definition. The multimodal processors need
only its Python code, so it is sufficient to declare the two operators without an implementation.

`changes` copies this file into an environment, with a `.pth` file that imports it
at the start of every Python process: vLLM spawns its engines, so a patch made in one process does
not reach the others.
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
    """Return the library that declares the operators.

    It is cached: the operators exist as long as the library, and can be declared only once.
    """
    # Imported late: processes that never use torch load this module too.
    from torch.library import Library  # noqa: PLC0415

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + SCHEMA)
    return library


class OperatorLoader(SourceFileLoader):
    """Loader of torchvision that declares its operators first."""

    def exec_module(self, module: ModuleType) -> None:
        """Declare the operators, then execute the package."""
        operators()
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finder of torchvision only; it does not import torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torchvision's usual spec with an `OperatorLoader`; None for other modules."""
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = OperatorLoader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
