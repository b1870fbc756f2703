"""Results of a run of the matrix."""

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """Outcome of a case."""

    EQUAL = "equal"
    REFUSED = "refused by both"
    DIFFERENT = "different"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one case.

    Attributes:
        name: name of the case.
        outcome: outcome of the case.
        detail: differences, or the text of the refusal.
    """

    name: str
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class Result:
    """Result of a model in a topology.

    Attributes:
        model: name of the model.
        topology: name of the topology.
        vllm: version of vLLM.
        date: day, in ISO 8601 format.
        dtype: data type of the engines' computations.
        seconds: duration of the run, in seconds.
        distinct: number of items, of four per modality, with distinct answers.
        sent: form in which prefill and decode got known items: metadata or media.
        hits: number of repeated requests with hits only and no encode request.
        repeats: number of repeated requests.
        lost: number of entries that consumers did not get.
        cases: results of the cases.
        notes: other observations, such as an engine that died.
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
        return sum(case.outcome is outcome for case in self.cases)
