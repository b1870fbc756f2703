"""Names that docs/compatibility.md promises, with their meaning, as the code has them.

    python -m tests.compat.surface   writes promises.txt, at the cut of a release

A line of the file is a kind and a name, and after two spaces the type, the default or the labels.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ec_store import check_url
from ec_store.__main__ import make_parser as ec_store_parser
from epd.__main__ import make_parser as epd_parser
from epd.config.flags import FIELDS, SECRETS, variables_of
from epd.observe.metric_defs import METRIC_DEFS
from epd.parser import flag_of
from epd.server.app import ROUTES
from tests.paths import ROOT

RECORDED = Path(__file__).parent / "promises.txt"

Line = tuple[str, str]
"""Kind and name, and meaning."""

PUBLIC = (
    *("ec_store", "epd", "ec_store.backends:Backend"),
    *("ec_store.arena.tier:Tier", "ec_store.arena.tier:SharedTier"),
    *("epd.policies.policy:Policy", "epd.policies.policy:Facts", "epd.policies.policy:Course"),
    *("epd.policies.policy:ItemRule", "epd.policies.policy:ItemFacts"),
    *("epd.policies.policy:ItemPlace", "epd.transfer.kv:KVTransfer", "epd.transfer.kv:Handover"),
    *("epd.transfer.kv:Prefilled", "epd.transfer.ec:ECTransfer"),
)
"""What other packages import: modules with `__all__`, and classes for plug-ins."""

CONTRACTS = {
    "ec_store.testing.stores": ("StoreContract",),
    "ec_store.testing.claims": ("ClaimsContract",),
    "ec_store.testing.tiers": ("TierContract", "SharedTierContract"),
}
GROUPS = ("ec_store.backends", "epd.kv_transfers", "epd.ec_transfers", "epd.policies")

URLS = ("file:///s?%", "shm:///s?%", "redis://h?%", "redis+cluster://h?%", "mooncake://h:1?%")

OF_SERVICE = {
    "GAUGES": ("", "gauge"),
    "MEMORY_GAUGES": ("", "gauge"),
    "COUNTERS": ("", "counter"),
    "TIER_COUNTERS": ("tier_", "counter tier"),
    "TIER_GAUGES": ("tier_", "gauge tier"),
}
"""Dictionaries of metrics in `ec_store.service`: part of their names, kind and labels."""

HEADER = re.compile(
    r"x-(epd|request|trace|should|session|vllm|api)-[a-z-]+|retry-after|server-timing"
    r"|endpoint-load-metrics(-format)?",
    re.IGNORECASE,
)
ERROR = re.compile(r"^\| (`[a-z_`, ]+`) \|", re.MULTILINE)


def surface() -> dict[str, str]:
    """Return the meaning of each promised name."""
    parts = (
        *(settings(), flags(), connector(), urls(), metrics()),
        *(wire(), errors(), plugins(), python()),
    )
    return {name: meaning for part in parts for name, meaning in sorted(part)}


def recorded() -> dict[str, str]:
    """Return the meaning of each name of the last record."""
    lines = (line.partition("  ") for line in RECORDED.read_text().splitlines())
    return {name: meaning for name, _, meaning in lines}


def settings() -> Iterator[Line]:
    for name, field in FIELDS.items():
        flag = " ".join(variables_of(name)) if name in SECRETS else flag_of(name)
        yield f"setting {flag}", f"{type_text(field.annotation)} = {field.default!r}"
        for choice in get_args(field.annotation) if is_choice(field.annotation) else ():
            yield f"setting {flag} {choice}", ""


def is_choice(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


def type_text(annotation: Any) -> str:
    """Return a type without modules and without functions that check its values."""
    if is_choice(annotation):
        return "choice"
    text = inspect.formatannotation(annotation)
    text = re.sub(r"(?:typing\.)?Annotated\[(\w+), [^\]]*\]", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+", "", text)


def flags() -> Iterator[Line]:
    """Yield the flags of all commands; those of settings are no flags of the commands."""
    common = {flag_of(name) for name in FIELDS}
    common |= {flag.replace("--", "--no-", 1) for flag in common}
    for name, default in _flags("epd", epd_parser()):
        command, _, flag = name.rpartition(" ")
        if command not in {"epd serve", "epd check", "epd doctor"} or flag not in common:
            yield f"flag {name}", default
    for name, default in _flags("ec-store", ec_store_parser()):
        yield f"flag {name}", default


def connector() -> Iterator[Line]:
    """Yield the options of the connector, of its module alone: its package needs vLLM."""
    path = ROOT / "ec_store/vllm_connector/config.py"
    spec = spec_from_file_location("connector_config", path)
    assert spec is not None
    assert spec.loader is not None
    config = module_from_spec(spec)
    spec.loader.exec_module(config)
    for name, field in config.ConnectorConfig.model_fields.items():
        default = "" if field.is_required() else f" = {field.default!r}"
        yield f"connector {name}", type_text(field.annotation) + default


def _flags(command: str, parser: argparse.ArgumentParser) -> Iterator[Line]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, sub in action.choices.items():
                yield from _flags(f"{command} {name}", sub)
        elif action.help is not argparse.SUPPRESS and action.dest != "help":
            named = not isinstance(action.default, str) or action.default != argparse.SUPPRESS
            default = f"= {action.default!r}" if named and action.default is not None else ""
            for name in action.option_strings or [str(action.metavar or action.dest)]:
                yield f"{command} {name}", default
                for choice in action.choices or ():
                    yield f"{command} {name} {choice}", ""


def urls() -> Iterator[Line]:
    """Yield the parameters of each store's URL: the message about an unknown one lists them."""
    for url in URLS:
        try:
            check_url(url.replace("%", "unknown=1"))
        except ValueError as error:
            for name in str(error).partition("known: ")[2].split(", "):
                yield f"url {url.partition(':')[0]}://?{name}", ""


def metrics() -> Iterator[Line]:
    for metric in METRIC_DEFS.values():
        yield f"metric {metric.name}", " ".join([metric.kind, *metric.labels])
    for kind, names in constants("ec_store/vllm_connector/metrics.py").items():
        if kind in {"COUNTERS", "GAUGES", "HISTOGRAMS"}:
            for name in names:
                yield f"metric vllm:ec_store_{name}", kind.lower().removesuffix("s")
    found = constants("ec_store/service.py")
    for kind, (prefix, meaning) in OF_SERVICE.items():
        for name in found[kind]:
            yield f"metric ec_store_{prefix}{name}", meaning
    for node in ast.walk(parsed("ec_store/service.py")):
        match node:
            case ast.Call(ast.Name(called), [ast.Constant(str(name)), *_], keywords) if (
                name.startswith("ec_store_")
            ):
                named = [each.value for each in keywords if each.arg == "labels"]
                labels = ast.literal_eval(named[0]) if named else []
                kind = called.removesuffix("MetricFamily").lower()
                yield f"metric {name}", " ".join([kind, *labels])


def wire() -> Iterator[Line]:
    for access, route in ROUTES:
        yield f"route {route.method} {route.path}", access.name.lower()
    sources = [Path("epd/errors.py")]
    for folder in ("api", "edge", "request", "server"):
        sources += [path.relative_to(ROOT) for path in (ROOT / "epd" / folder).rglob("*.py")]
    for source in sources:
        for node in ast.walk(parsed(str(source))):
            if isinstance(node, ast.Constant) and HEADER.fullmatch(str(node.value)):
                yield f"header {str(node.value).lower()}", ""


def errors() -> Iterator[Line]:
    """Yield the values of `x-epd-error` in the table of errors."""
    text = (ROOT / "docs/configuration/operation.md").read_text()
    for row in ERROR.findall(text.partition("## Errors")[2].partition("\n## ")[0]):
        for name in re.findall(r"[a-z_]+", row):
            yield f"error {name}", ""


def plugins() -> Iterator[Line]:
    for group in GROUPS:
        yield f"entry-points {group}", ""
        for point in entry_points(group=group):
            yield f"entry-points {group} {point.name}", ""
    for module, names in CONTRACTS.items():
        for name in names:
            assert getattr(import_module(module), name)
            yield f"python {module}.{name}", ""


def python() -> Iterator[Line]:
    for entry in PUBLIC:
        module, _, name = entry.partition(":")
        loaded = import_module(module)
        for each in [name] if name else loaded.__all__:
            value = getattr(loaded, each)
            yield f"python {module}.{each}", ""
            yield from _members(f"python {module}.{each}", value)


def _members(name: str, value: Any) -> Iterator[Line]:
    """Yield the parameters of a function, or the fields and the methods of a class."""
    if inspect.isfunction(value):
        yield from _parameters(name, value)
    if not inspect.isclass(value):
        return
    attributes = _attributes(value)
    yield from ((f"{name}.{each}", _default(default)) for each, default in attributes.items())
    for member, function in vars(value).items():
        if member.startswith("_") or member in attributes:
            continue
        if isinstance(function, (property, cached_property)):
            yield f"{name}.{member}", ""
        elif inspect.isfunction(function):
            yield f"{name}.{member}()", ""
            yield from _parameters(f"{name}.{member}", function)


def _attributes(value: type) -> dict[str, Any]:
    """Return the fields of a class with their defaults."""
    if is_dataclass(value):
        return {field.name: field.default for field in fields(value)}
    if names := getattr(value, "_fields", ()):  # a NamedTuple
        defaults: dict[str, Any] = getattr(value, "_field_defaults", {})
        return {name: defaults.get(name, MISSING) for name in names}
    named = [name for name in inspect.get_annotations(value) if not name.startswith("_")]
    return {name: vars(value).get(name, MISSING) for name in named}


def _parameters(name: str, function: Any) -> Iterator[Line]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            by_name = "by name " if parameter.kind is parameter.KEYWORD_ONLY else ""
            default = MISSING if parameter.default is parameter.empty else parameter.default
            yield f"{name}({parameter.name})", f"{by_name}{_default(default)}".strip()


def _default(value: object) -> str:
    if value is MISSING:
        return ""
    return "= a function" if inspect.isfunction(value) else f"= {value!r}"


def parsed(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text())


def constants(source: str) -> dict[str, list[str]]:
    """Return the keys of each dictionary of a module, which may need vLLM, by its name."""
    found = {}
    for node in parsed(source).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Dict(keys)):
                found[name] = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return found


def main() -> None:
    """Record the surface of this release."""
    lines = (f"{name}  {meaning}".rstrip() for name, meaning in surface().items())
    RECORDED.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
