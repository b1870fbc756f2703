"""Verdict of a comparison in words: what to run, by how much, and where it loses. No I/O."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean

from epd.tools.bench.compare.figures import Figures

PLAIN = "plain"
MARGIN = 1.05
"""Smallest gain that counts: repeated runs differ by some percent."""

OTHERS = 0.1
"""Share of the cores that other programs may use: above, the figures say nothing."""

Measured = Mapping[str, Mapping[str, Figures]]
"""Figures by arm and workload."""

Gains = Mapping[str, float]
"""Gain over plain vLLM by figure: above 1 is better."""

RATE, TTFT = "requests/s", "TTFT"


def verdict(measured: Measured) -> Iterator[str]:
    """Yield the sentences of the verdict, the most important one first."""
    plain = measured.get(PLAIN)
    if not plain:
        yield "No verdict: plain vLLM was not measured, and gains are relative to it."
        return
    yield from _disturbed(measured)
    reasons = {arm: [*_reasons(of_arm)] for arm, of_arm in measured.items()}
    yield from _unfit(measured, reasons)
    gains = {
        arm: gains_of_arm
        for arm, of_arm in measured.items()
        if arm != PLAIN and not reasons[arm] and (gains_of_arm := _gains(of_arm, plain))
    }
    shared = [name for name in plain if all(name in of_arm for of_arm in gains.values())]
    if not gains or not shared:
        yield "No verdict: no other arm can be compared with plain vLLM."
        return
    overall = {
        arm: geometric_mean([_mean(of_arm[name]) for name in shared])
        for arm, of_arm in gains.items()
    }
    best = _choice(overall)
    yield _advice(best, overall[best], plain_fails=bool(reasons[PLAIN]))
    for name in plain:
        at = {arm: of_arm[name] for arm, of_arm in gains.items() if name in of_arm}
        if at:
            yield _best_for(name, at)
    yield from _where_arms_lose(gains)
    yield from _differences_at_once(measured)


def _unfit(measured: Measured, reasons: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for arm, these in reasons.items():
        for reason in these:
            yield f"`{arm}` cannot be recommended: {reason}."
    asked = len(measured[PLAIN])
    for arm, of_arm in measured.items():
        if len(of_arm) < asked:
            yield f"`{arm}` is incomplete: it has {len(of_arm)} of {asked} workloads."


def _reasons(arm: Mapping[str, Figures]) -> Iterator[str]:
    """Yield why an arm cannot be recommended."""
    if failed := sum(figures.failed for figures in arm.values()):
        yield f"{failed} of its requests failed"
    different, compared = _different(figures for figures in arm.values() if figures.at_once == 1)
    if different:
        yield (
            f"{different} of {compared} answers differ one at a time, so it computes something "
            "else than plain vLLM"
        )


def _disturbed(measured: Measured) -> Iterator[str]:
    """Yield a sentence if other programs used the machine while an arm was measured."""
    shares = {}
    for arm, workloads in measured.items():
        seconds = sum(each.seconds for each in workloads.values())
        if seconds:
            used_s = sum(each.others * each.seconds for each in workloads.values())
            shares[arm] = used_s / seconds
    if any(share > OTHERS for share in shares.values()):
        listed = ", ".join(f"{share:.0%} (`{arm}`)" for arm, share in shares.items())
        yield (
            f"Do not trust these figures: other programs used {listed} of the machine's cores. "
            "Measure again on an idle machine."
        )


def _choice(gains: Mapping[str, float]) -> str:
    """Return the arm with the largest gain, or an earlier, simpler one that gains about as much."""
    best = max(gains, key=lambda arm: gains[arm])
    near = [arm for arm, gain in gains.items() if gain > MARGIN and gains[best] <= gain * MARGIN]
    return near[0] if near else best


def _advice(best: str, gain: float, *, plain_fails: bool) -> str:
    mean = "geometric mean over the workloads of requests/s and TTFT"
    if gain > MARGIN:
        return f"Run `{best}`: {gain:.2f}x of plain vLLM ({mean})."
    if plain_fails:
        return f"No advice: plain vLLM failed requests, and `{best}` is {gain:.2f}x of it ({mean})."
    if gain * MARGIN < 1:
        return f"Plain vLLM is better here: the best other arm, `{best}`, is {gain:.2f}x ({mean})."
    return (
        f"Run plain vLLM, which is simpler: the best other arm, `{best}`, is {gain:.2f}x of it "
        f"({mean}), and less than {MARGIN - 1:.0%} may be noise."
    )


def _best_for(workload: str, gains: Mapping[str, Gains]) -> str:
    means = {arm: _mean(of_arm) for arm, of_arm in gains.items()}
    best = _choice(means)
    if means[best] <= MARGIN:
        return f"{workload}: `{PLAIN}`."
    return f"{workload}: `{best}`, {_listed(gains[best])}."


def _gains(arm: Mapping[str, Figures], plain: Mapping[str, Figures]) -> Mapping[str, Gains]:
    """Return the gains over plain vLLM by workload, of those in which plain failed no request."""
    found = {}
    for name, figures in arm.items():
        if name in plain and not plain[name].failed:
            before = plain[name]
            gains = {}
            if figures.at_once > 1:
                gains[RATE] = figures.requests_per_s / before.requests_per_s
            kinds = before.ttft_ms.keys() & figures.ttft_ms.keys()
            gains[TTFT] = geometric_mean(
                [before.ttft_ms[kind] / figures.ttft_ms[kind] for kind in kinds]
            )
            found[name] = gains
    return found


def _mean(gains: Gains) -> float:
    return geometric_mean(gains.values())


def _losses(gains: Gains) -> Gains:
    return {figure: gain for figure, gain in gains.items() if gain * MARGIN < 1}


def _where_arms_lose(gains: Mapping[str, Mapping[str, Gains]]) -> Iterator[str]:
    for arm, of_arm in gains.items():
        losses = {name: _losses(ratios) for name, ratios in of_arm.items()}
        listed = "; ".join(
            f"{name}, {_listed(ratios)}" for name, ratios in losses.items() if ratios
        )
        if listed:
            yield f"`{arm}` loses in: {listed}."


def _listed(gains: Gains) -> str:
    """Return the ratios to plain vLLM: `2.00x requests/s, 0.50x TTFT`."""
    return ", ".join(
        f"{1 / gain if figure == TTFT else gain:.2f}x {figure}" for figure, gain in gains.items()
    )


def _different(workloads: Iterable[Figures]) -> tuple[int, int]:
    """Return the numbers of answers that differ from those of plain vLLM, and of compared ones."""
    counts = [(figures.equal, figures.compared) for figures in workloads]
    compared = sum(count for _, count in counts)
    return compared - sum(equal for equal, _ in counts), compared


def _differences_at_once(measured: Measured) -> Iterator[str]:
    for arm, workloads in measured.items():
        different, compared = _different(each for each in workloads.values() if each.at_once > 1)
        if different:
            yield (
                f"`{arm}`: {different} of {compared} answers differ at once: the batches differ, "
                "which changes answers in 16-bit types."
            )
