"""Flags in a command line of vLLM. No I/O."""

from collections.abc import Iterable

RECONFIGURING = frozenset(
    {"--config", "--config-format", "--convert", "--hf-config-path", "--hf-overrides", "--runner"}
)
"""Flags of vLLM that make `config.json` an incomplete description of the model."""


def overrides_config(flags: Iterable[str]) -> bool:
    """Return whether flags of vLLM make `config.json` an incomplete description of the model."""
    return any(_name(flag) in RECONFIGURING for flag in flags)


def flag_value(flags: Iterable[str], name: str) -> str | None:
    """Return the last value of a flag of vLLM; None: the flag is absent."""
    words, value = [*flags], None
    for position, word in enumerate(words, 1):
        if _name(word) == name:
            value = word.partition("=")[2] if "=" in word else next(iter(words[position:]), None)
    return value


def _name(flag: str) -> str:
    """Return a flag's name as vLLM reads it: `--hf_overrides.a=1` is `--hf-overrides`."""
    return flag.partition("=")[0].partition(".")[0].replace("_", "-")
