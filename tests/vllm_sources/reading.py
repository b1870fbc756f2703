"""Reads Python sources of vLLM without importing them."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".run" / "vllm-sources"
"""Folder in which `scripts/check_vllm.sh VERSION` unpacks a release: `VERSION/vllm`."""
VARIABLE = "EPD_VLLM_SOURCES"
"""Variable with further folders that contain a package `vllm`, separated as in PATH."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """Source of one vLLM release.

    Attributes:
        name: name in test ids.
        package: its folder `vllm`.
    """

    name: str
    package: Path

    def text(self, path: str) -> str:
        """Return the text of a file, given its path in the package."""
        return (self.package / path).read_text(encoding="utf-8")

    def files(self, folder: str) -> Iterator[Path]:
        """Return all modules of a folder, recursively."""
        yield from sorted((self.package / folder).rglob("*.py"))

    def classes(self, folder: str, name: str) -> list[ast.ClassDef]:
        """Return the classes with this name in a module or a folder of modules."""
        paths = [self.package / folder] if folder.endswith(".py") else self.files(folder)
        found = (one for path in paths for one in parsed(path).body)
        return [one for one in found if isinstance(one, ast.ClassDef) and one.name == name]

    def a_class(self, folder: str, name: str) -> ast.ClassDef:
        """Return the only class with this name."""
        [one] = self.classes(folder, name)
        return one

    def keys_of(self, folder: str, name: str) -> frozenset[str]:
        """Return the keys of the only dictionary that a module of the folder assigns to a name."""
        [found] = [
            frozenset(key.value for key in value.keys if isinstance(key, ast.Constant))
            for path in self.files(folder)
            if name in path.read_text(encoding="utf-8")
            for target, value in assigned(parsed(path))
            if target == name and isinstance(value, ast.Dict)
        ]
        return frozenset(map(str, found))

    def words(self, *folders: str) -> frozenset[str]:
        """Return all string constants of the modules."""
        return frozenset(
            node.value
            for folder in folders
            for path in ([self.package / folder] if folder.endswith(".py") else self.files(folder))
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the assignments of a module to simple names."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def methods(of: ast.ClassDef) -> dict[str, Function]:
    """Return a class's own methods, by name."""
    return {one.name: one for one in of.body if isinstance(one, Function)}


def fields(of: ast.ClassDef) -> frozenset[str]:
    """Return a class's annotated names."""
    return frozenset(
        one.target.id
        for one in of.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    )


def is_abstract(method: Function) -> bool:
    """Return whether a method is abstract."""
    return any("abstractmethod" in ast.unparse(one) for one in method.decorator_list)


def positional(method: Function) -> list[str]:
    """Return the names of the positional parameters, without `self` or `cls`."""
    return [one.arg for one in (*method.args.posonlyargs, *method.args.args)][1:]


def sources() -> list[Source]:
    """Return the installed vLLM, the unpacked releases, and those that the variable names."""
    packages = [path / "vllm" for path in sorted(UNPACKED.glob("*")) if path.is_dir()]
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    packages += [Path(folder) / "vllm" for folder in named if folder]
    spec = find_spec("vllm")
    if spec is not None and spec.origin is not None:
        packages.insert(0, Path(spec.origin).parent)
    unique = dict.fromkeys(path.resolve() for path in packages if (path / "config").is_dir())
    return [Source(_release(path), path) for path in unique]


def _release(package: Path) -> str:
    version = package / "_version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else package.parent.name
