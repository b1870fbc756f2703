"""The tables of results in docs/models.md."""

from collections.abc import Iterator, Sequence

from scripts.generated import filled
from scripts.matrix.cases import DISTINCT
from scripts.matrix.results import Outcome, Result
from scripts.matrix.subjects import E_P_D, E_PD, SUBJECTS, Subject

NOT_RUN = "not run"
NAMES = {E_PD: "E+PD", E_P_D: "E+P+D"}


def written(document: str, results: Sequence[Result]) -> str:
    """Return the document with updated tables; all other text stays."""
    tables = {"matrix of the models": matrix, "differences of the models": noted}
    return filled(document, lambda name, _: tables[name](results))


def matrix(results: Sequence[Result]) -> str:
    head = ["model", "modalities", *NAMES.values(), "repeated: a hit", "prefill and decode get"]
    lines = [row(head), row(["---"] * len(head))]
    for subject in SUBJECTS:
        own = {result.topology: result for result in results if result.model == subject.name}
        lines.append(row(cells(subject, own)))
    return "\n".join([*lines, "", *measured(results), ""])


def cells(subject: Subject, own: dict[str, Result]) -> Iterator[str]:
    yield subject.family
    first = own.get(E_PD) or own.get(E_P_D)
    if first is None:
        yield ", ".join(subject.modalities)
    else:
        yield ", ".join(told_apart(modality, first) for modality in subject.modalities)
    for topology in NAMES:
        yield equal(own[topology]) if topology in own else NOT_RUN
    repeats = sum(result.repeats for result in own.values())
    yield f"{sum(result.hits for result in own.values())} of {repeats}" if own else NOT_RUN
    sent = {what: kind for result in own.values() for what, kind in result.sent.items()}
    yield ", ".join(f"{modality}: {kind}" for modality, kind in sent.items()) or NOT_RUN


def told_apart(modality: str, result: Result) -> str:
    """Return a modality, with the number of distinct answers unless all items are told apart."""
    count = result.distinct.get(modality, DISTINCT)
    return modality if count == DISTINCT else f"{modality} ({count} of {DISTINCT} told apart)"


def equal(result: Result) -> str:
    """Return the number of equal cases, of those that one engine accepts."""
    refused, not_run = result.count(Outcome.REFUSED), result.count(Outcome.NOT_RUN)
    cell = f"{result.count(Outcome.EQUAL)} of {len(result.cases) - refused}"
    beside = [f"{refused} refused by both"] * bool(refused) + [f"{not_run} not run"] * bool(not_run)
    return f"{cell} ({', '.join(beside)})" if beside else cell


def noted(results: Sequence[Result]) -> str:
    """Return a table of differences and refusals, one row for all equal ones, and notes."""
    head = ["model", "topology", "case", "result"]
    lines = [row(head), row(["---"] * len(head))]
    families = {subject.name: subject.family for subject in SUBJECTS}
    for result in results:
        where = families[result.model], NAMES[result.topology]
        cases: dict[str, list[str]] = {}
        for case in result.cases:
            if case.outcome in {Outcome.DIFFERENT, Outcome.REFUSED}:
                cases.setdefault(f"{case.outcome}: {case.detail}", []).append(case.name)
        lines += [row([*where, "; ".join(names), seen]) for seen, names in cases.items()]
        lines += [row([*where, "", note]) for note in result.notes]
        lines += [row([*where, "", f"{result.lost} entries not found by a consumer"])] * bool(
            result.lost
        )
    return "\n".join([*lines, ""])


def measured(results: Sequence[Result]) -> Iterator[str]:
    """Yield a sentence about the vLLM version and the dates of the runs."""
    if results:
        versions = ", ".join(sorted({result.vllm for result in results}))
        dates = sorted({result.date for result in results})
        yield f"vLLM {versions} on a CPU, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."


def row(values: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(value.replace('|', '/').replace(chr(10), ' ') for value in values)} |"
