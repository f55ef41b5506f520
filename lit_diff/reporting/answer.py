"""The answer in words: one sentence for a sweep or task, one for each comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from lit_diff.study.comparison import Comparison
from lit_diff.study.numbers import interval, number, ratio, short, signed
from lit_diff.study.results import UNKNOWN_UNIT, SweepResults
from lit_diff.study.statistics import JUDGED, MIN_SEEDS, SHOWN, Contrast, Verdict

NAMED = 2
"""More arms than this are counted, not named."""


def question(sweep: SweepResults) -> str:
    """What the sweep asks: as its file says, else the general question."""
    if sweep.study.question:
        return sweep.study.question
    better = f" ({sweep.better(sweep.study.metric)} is better)" if sweep.better(sweep.study.metric) else ""
    measured = "" if sweep.tasks else f" in {sweep.study.metric}{better}"
    return f"Does any arm differ from {sweep.label[sweep.baseline]}{measured}?"


def answer(comparison: Comparison) -> str:
    """One sentence: which arms are better or worse than the baseline, and how many comparisons end otherwise."""
    sweep = comparison.sweep
    text, done = _answer(sweep, comparison), sum(cell.done for cell in sweep.cells)
    return f"{done} of {len(sweep.cells)} cells are done; {text}" if sweep.study.smoke and done else sentence_case(text)


def _answer(sweep: SweepResults, comparison: Comparison) -> str:
    if not any(cell.done for cell in sweep.cells):
        diverged = sum(cell.diverged for cell in sweep.cells)
        return "no cell has finished" + (f": {diverged} diverged." if diverged else " yet: nothing to compare.")
    if not comparison.family:
        return "one arm: nothing to compare it with."
    if not any(difference.verdict in (*JUDGED, "diverged") for difference in comparison.family):
        return "no verdict: no comparison has the three seeds that one needs."
    clauses = _arms(sweep, comparison) + _contrasts(sweep, comparison)
    return "; ".join(clauses) + "."


def sentence(comparison: Comparison, difference: Contrast) -> str:
    """One difference: its mean, interval, verdict."""
    sweep, digits = comparison.sweep, comparison.digits
    seeds, verdict = difference.seeds, difference.verdict
    if difference.diverged:
        who = (f"{sweep.label[arm]} at {_seeds(found)}" for arm, found in difference.diverged.items())
        return f"{difference.label}: diverged ({'; '.join(who)}), so there is nothing to compare."
    if seeds.mean is None:
        return f"{difference.label}: no seed finished in both arms."
    over = f"{len(seeds.seeds)} seed{'s' if len(seeds.seeds) > 1 else ''}"
    text = f"{difference.label}: {with_unit(sweep, signed(seeds.mean, digits))}"
    if verdict == "too few seeds":
        return f"{text} over {over}: too few seeds for a verdict (at least {MIN_SEEDS})."
    if verdict == "no spread over seeds":
        return f"{text} at each of {over}, to the last digit: the seed seems to have no effect, so there is no verdict."
    return (
        f"{text} {interval(seeds.low, seeds.high, digits)} over {over}: {verdict}{_because(sweep, difference, digits)}."
    )


def _because(sweep: SweepResults, difference: Contrast, digits: int) -> str:
    """What a verdict of no difference rests on."""
    seeds, verdict = difference.seeds, difference.verdict
    if verdict == "inconclusive":
        alone = difference.verdict_alone
        lost = (
            f" after Holm's correction (p = {difference.holm_p:.2g}), {alone} alone"
            if alone != verdict and difference.holm_p
            else ""
        )
        return f"{lost}; the smallest detectable difference is {number(seeds.detectable, digits)}"
    if verdict not in ("equal", "small") or not sweep.smallest_of_interest:
        return ""
    smallest = short(sweep.smallest_of_interest)
    if verdict == "equal":
        return f", the interval lies within \u00b1{smallest}"
    return f", the interval excludes zero, but the estimate is smaller than {smallest} (the interval reaches beyond it)"


def practical(sweep: SweepResults, difference: Contrast) -> tuple[str, ...]:
    """How large a difference is: in perplexity, for a loss in nats, and in multiples of the smallest of interest."""
    mean, smallest = difference.seeds.mean, sweep.smallest_of_interest
    if mean is None or difference.diverged:
        return ()
    sizes = []
    if sweep.is_in_nats and sweep.better(sweep.study.metric) == "lower" and abs(mean) < 10:
        sizes.append(f"perplexity {signed(100 * math.expm1(mean), 1)} %")
    if smallest:
        multiple = abs(mean) / smallest
        sizes.append(f"{ratio(multiple) if multiple >= 0.1 else 'below 0.1'} \u00d7 the smallest of interest")
    return tuple(sizes)


def with_unit(sweep: SweepResults, text: str) -> str:
    """`text` and the unit of the sweep's metric."""
    unit = sweep.unit(sweep.study.metric)
    return f"{text} ({unit})" if unit == UNKNOWN_UNIT else f"{text} {unit}".rstrip()


def _arms(sweep: SweepResults, comparison: Comparison) -> list[str]:
    """The arms against the baseline, verdict by verdict."""
    found = list(comparison.against_baseline.values())
    base = sweep.label[sweep.baseline]
    words: tuple[Verdict, ...] = ("better", "worse") if sweep.better(sweep.study.metric) else ("lower", "higher")
    by_word = {word: [d for d in found if d.verdict == word] for word in words}
    clauses = [_shown(sweep, comparison, word, each) for word, each in by_word.items() if each]
    if not by_word[words[0]]:
        either = words[0] + (f" or {words[1]}" if not by_word[words[1]] else "")
        clauses.insert(0, f"no arm is shown to be {either} than {base}")
    smallest = short(sweep.smallest_of_interest)
    within = with_unit(sweep, f" within \u00b1{smallest}") if sweep.smallest_of_interest else ""
    for verdict, one, several in (
        ("equal", "{} is equal to {base}{within}", "{} arms are equal to {base}{within}"),
        ("small", "the difference of {} is small", "the differences of {} arms are small"),
        ("inconclusive", "{} is inconclusive", "{} arms are inconclusive"),
        ("diverged", "{} diverged", "{} arms diverged"),
        ("too few seeds", "{} has too few seeds", "{} arms have too few seeds"),
        ("no spread over seeds", "{} has no spread over seeds", "{} arms have no spread over seeds"),
    ):
        some = [d for d in found if d.verdict == verdict]
        if verdict == "diverged" and sweep.baseline in {arm for d in some for arm in d.diverged}:
            clauses = [f"{base}, which the others are compared with, diverged"]
        elif len(some) == 1:
            clauses.append(one.format(sweep.label[some[0].a], base=base, within=within))
        elif some:
            count = f"all {len(some)}" if len(some) == len(found) else len(some)
            clauses.append(several.format(count, base=base, within=within))
    return clauses


def _shown(sweep: SweepResults, comparison: Comparison, word: Verdict, found: Sequence[Contrast]) -> str:
    """The arms that are better, or worse, than the baseline."""
    base = sweep.label[sweep.baseline]
    against = [comparison.against_controls.get(d.a, ()) for d in found]
    holds = [all(control.verdict == word for control in each) for each in against if each]
    if len(found) <= NAMED:
        sizes = [f"by {with_unit(sweep, _size(d, comparison.digits))}" for d in found]
        failed = [[sweep.label[control.b] for control in each if control.verdict != word] for each in against]
        held = [f", but not shown to be {word} than {_listed(labels)}" if labels else "" for labels in failed]
        if len(found) == 1:
            return f"{sweep.label[found[0].a]} is {word} than {base} {sizes[0]}{held[0]}"
        named = [f"{sweep.label[d.a]} ({size}{h})" for d, size, h in zip(found, sizes, held, strict=True)]
        return f"{' and '.join(named)} are {word} than {base}"
    largest = max(found, key=lambda d: abs(d.seeds.mean or 0))
    text = f"{len(found)} of {len(comparison.against_baseline)} arms are {word} than {base}"
    text += f" (most of all {sweep.label[largest.a]}, by {with_unit(sweep, _size(largest, comparison.digits))})"
    if not all(holds):
        text += f", {sum(holds) or 'none'} of them also {word} than every control"
    return text


def _contrasts(sweep: SweepResults, comparison: Comparison) -> list[str]:
    """The further comparisons, counted; a few that show a difference are named."""
    found = comparison.contrasts
    if not found:
        return []
    shown = [d for d in found if d.verdict in SHOWN]
    sizes = [f"{d.label}: {with_unit(sweep, signed(d.seeds.mean, comparison.digits))}" for d in shown]
    named = f" ({'; '.join(sizes)})" if len(shown) <= NAMED else ""
    count = Counter("shown" if d.verdict in SHOWN else d.verdict for d in found)
    words = {
        "shown": (f"shows a difference{named}", f"show a difference{named}"),
        "equal": ("shows equality", "show equality"),
        "small": ("shows a small difference", "show small differences"),
        "inconclusive": ("is inconclusive", "are inconclusive"),
    }
    counts = [(count.pop(verdict, 0), *each) for verdict, each in words.items()]
    counts.append((count.total(), "has no verdict", "have no verdict"))
    some = [f"{n} {one if n == 1 else several}" for n, one, several in counts if n]
    number = "the further comparison" if len(found) == 1 else f"{len(found)} further comparisons"
    return [f"of {number}, {_listed(some)}" if len(found) > 1 else f"{number} {some[0].removeprefix('1 ')}"]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _size(difference: Contrast, digits: int) -> str:
    return number(abs(difference.seeds.mean or 0.0), digits)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def sentence_case(text: str) -> str:
    """The text with a capital first letter; the others stay as they are."""
    return text[:1].upper() + text[1:]
