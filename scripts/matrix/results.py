"""What a run of the matrix found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a case ended."""

    EQUAL = "equal"
    REFUSED = "refused by both"
    DIFFERENT = "different"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case ended.

    Attributes:
        name: the case.
        outcome: how it ended.
        detail: what differed, or the refusal.
    """

    name: str
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class Result:
    """What a model's run in a topology found.

    Attributes:
        model: its name.
        topology: the topology.
        vllm: vLLM's version.
        date: the day, as ISO 8601 writes it.
        dtype: what the engines computed in.
        seconds: how long all of it took.
        distinct: how many of four items of a modality had answers of their own.
        sent: what prefill and decode got of an item that had been seen: metadata or media.
        hits: how many repeated requests had hits alone, and caused no encode request.
        repeats: how many repeated requests there were.
        lost: how many entries the consumers did not get.
        cases: how each case ended.
        notes: what else was seen, such as an engine that died.
    """

    model: str
    topology: str
    vllm: str
    date: str
    dtype: str
    seconds: float = 0.0
    distinct: dict[str, int] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    hits: int = 0
    repeats: int = 0
    lost: int = 0
    cases: list[CaseResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        """How many cases ended so."""
        return sum(case.outcome is outcome for case in self.cases)


def of_json(known: Mapping[str, object]) -> Result:
    """Read a result."""
    fields: dict[str, object] = dict(known)
    rows: Sequence[Mapping[str, str]] = fields.pop("cases")  # type: ignore[assignment]
    cases = [CaseResult(row["name"], Outcome(row["outcome"]), row["detail"]) for row in rows]
    return Result(**fields, cases=cases)  # type: ignore[arg-type]
