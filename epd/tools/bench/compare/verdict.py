"""Verdict of a comparison in words: what to run, by how much, and where it loses. No I/O."""

from collections.abc import Iterator, Mapping
from statistics import geometric_mean

from epd.tools.bench.compare.figures import Figures

PLAIN = "plain"
MARGIN = 1.05
"""Smallest gain that counts: repeated runs differ by some percent."""

OTHERS = 0.1
"""Share of the cores that other programs may use: above, the figures say nothing."""

Measured = Mapping[str, Mapping[str, Figures]]
"""Figures by arm and workload."""


def verdict(measured: Measured) -> Iterator[str]:
    """Yield the sentences of the verdict, the most important one first."""
    plain = measured.get(PLAIN)
    if not plain:
        yield "No verdict: plain vLLM was not measured, and gains are relative to it."
        return
    failed = {arm: _failed(of_arm) for arm, of_arm in measured.items()}
    others = {
        arm: ratios
        for arm, of_arm in measured.items()
        if arm != PLAIN and not failed[arm] and (ratios := _gains(of_arm, plain))
    }
    yield from _disturbed(measured)
    for arm, count in failed.items():
        if count:
            yield f"`{arm}` cannot be recommended: {count} of its requests failed."
    if not others:
        yield "No verdict: no other arm answered all of its requests."
        return
    overall = {arm: geometric_mean(gains.values()) for arm, gains in others.items()}
    best = max(overall, key=lambda arm: overall[arm])
    yield _advice(best, overall[best])
    for workload in plain:
        yield _best_for(workload, measured, others)
    for arm, gains in others.items():
        if losses := [name for name, gain in gains.items() if gain * MARGIN < 1]:
            listed = "; ".join(_compared(measured[arm][name], plain[name], name) for name in losses)
            yield f"`{arm}` loses in: {listed}."
    yield from _answers(measured)


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


def _advice(best: str, gain: float) -> str:
    mean = "geometric mean over the workloads of requests/s and TTFT"
    if gain > MARGIN:
        return f"Run `{best}`: {gain:.2f}x of plain vLLM ({mean})."
    if gain * MARGIN < 1:
        return f"Plain vLLM is better here: the best other arm, `{best}`, is {gain:.2f}x ({mean})."
    return (
        f"Run plain vLLM, which is simpler: the best other arm, `{best}`, is {gain:.2f}x of it "
        f"({mean}), and less than {MARGIN - 1:.0%} may be noise."
    )


def _best_for(workload: str, measured: Measured, gains: Mapping[str, Mapping[str, float]]) -> str:
    at = {arm: of_arm[workload] for arm, of_arm in gains.items() if workload in of_arm}
    best = max(at, key=lambda arm: at[arm], default="")
    if not best or at[best] <= MARGIN:
        return f"{workload}: `{PLAIN}`."
    figures, plain = measured[best][workload], measured[PLAIN][workload]
    return f"{_compared(figures, plain, f'{workload}: `{best}`')}."


def _compared(figures: Figures, plain: Figures, name: str) -> str:
    """Return a name with the ratios to plain vLLM."""
    rate = f"{figures.requests_per_s / plain.requests_per_s:.2f}x requests/s, "
    ttft = f"{1 / _ttft_gain(figures, plain):.2f}x TTFT"
    return f"{name}, {rate if figures.at_once > 1 else ''}{ttft}"


def _gains(arm: Mapping[str, Figures], plain: Mapping[str, Figures]) -> dict[str, float]:
    """Return the gain over plain vLLM by workload: above 1 is better."""
    gains = {}
    for name, figures in arm.items():
        if name in plain and plain[name].ttft_ms:
            ratios = [_ttft_gain(figures, plain[name])]
            if figures.at_once > 1:
                ratios.append(figures.requests_per_s / plain[name].requests_per_s)
            gains[name] = geometric_mean(ratios)
    return gains


def _ttft_gain(figures: Figures, plain: Figures) -> float:
    return geometric_mean([plain.ttft_ms[kind] / ttft for kind, ttft in figures.ttft_ms.items()])


def _failed(arm: Mapping[str, Figures]) -> int:
    return sum(figures.failed for figures in arm.values())


def _answers(measured: Measured) -> Iterator[str]:
    """Yield a sentence for each arm with answers that differ from those of plain vLLM."""
    for arm, workloads in measured.items():
        for alone in (True, False):
            these = [each for each in workloads.values() if (each.at_once == 1) == alone]
            compared = sum(each.compared for each in these)
            if different := compared - sum(each.equal for each in these):
                why = (
                    "it computes something else than plain vLLM"
                    if alone
                    else "the batches differ, which changes answers in 16-bit types"
                )
                when = "one at a time" if alone else "at once"
                yield f"`{arm}`: {different} of {compared} answers differ {when}: {why}."
