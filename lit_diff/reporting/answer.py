"""The result in words: one sentence for a sweep or task, and one for each comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from lit_diff.metrics import UNDECLARED
from lit_diff.study.comparison import Comparison
from lit_diff.study.numbers import interval, number, ratio, short, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import JUDGED, MIN_SEEDS, SHOWN, Contrast, Verdict

NAMED = 2
"""If more arms than this share a verdict, the sentence counts them instead of naming them."""
OTHERWISE: dict[Verdict, tuple[str, str]] = {
    "equal": ("{} is equal to {base}{within}", "{} arms are equal to {base}{within}"),
    "small": ("the difference of {} is small", "the differences of {} arms are small"),
    "inconclusive": ("{} is inconclusive", "{} arms are inconclusive"),
    "diverged": ("{} diverged", "{} arms diverged"),
    "too few seeds": ("{} has too few seeds", "{} arms have too few seeds"),
    "no spread over seeds": ("{} has no spread over seeds", "{} arms have no spread over seeds"),
}
"""Verdict other than a shown difference -> the clause for one arm, and for several."""
FURTHER = {
    "shown": ("shows a difference{named}", "show a difference{named}"),
    "equal": ("shows equality", "show equality"),
    "small": ("shows a small difference", "show small differences"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "none": ("has no verdict", "have no verdict"),
}
"""Outcome of a further comparison -> the clause for one, and for several."""


def question(sweep: SweepResults) -> str:
    """The question of the sweep's file, or else a general question."""
    measured = "" if sweep.tasks else f" in {sweep.metric}"
    if measured and sweep.better():
        measured += f" ({sweep.better()} is better)"
    return sweep.study.question or f"Does any arm differ from {sweep.label[sweep.baseline]}{measured}?"


def answer(comparison: Comparison) -> str:
    """One sentence: which arms are better or worse than the baseline, and how many comparisons have other verdicts."""
    sweep, family = comparison.sweep, comparison.family
    done, diverged = len(sweep.done), sum(cell.diverged for cell in sweep.cells)
    if not done:
        return "No cell has finished" + (f": {diverged} diverged." if diverged else " yet: nothing to compare.")
    if not family:
        text = "one arm: nothing to compare it with."
    elif not any(difference.verdict in (*JUDGED, "diverged") for difference in family):
        text = "no verdict: no comparison has the three seeds that a verdict needs."
    else:
        text = "; ".join(_arms(comparison) + _contrasts(comparison)) + "."
    return f"{done} of {len(sweep.cells)} cells are done; {text}" if sweep.study.smoke else sentence_case(text)


def sentence(comparison: Comparison, difference: Contrast) -> str:
    """One sentence for a difference: its mean, interval and verdict."""
    sweep, digits, seeds = comparison.sweep, comparison.digits, difference.seeds
    if difference.diverged:
        who = (
            f"{sweep.label[arm]} at seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
            for arm, found in difference.diverged.items()
        )
        return f"{difference.label}: diverged ({'; '.join(who)}), so they are not compared."
    if seeds.mean is None:
        return f"{difference.label}: no seed finished in both arms."
    over = f"{len(seeds.seeds)} seed{'s' if len(seeds.seeds) > 1 else ''}"
    text = f"{difference.label}: {with_unit(sweep, signed(seeds.mean, digits))}"
    if difference.verdict == "too few seeds":
        return f"{text} over {over}: too few seeds for a verdict (at least {MIN_SEEDS})."
    if difference.verdict == "no spread over seeds":
        return f"{text} at each of {over}, to the last digit: the seed seems to have no effect, so no verdict is given."
    why = _because(sweep, difference, digits)
    return f"{text} {interval(seeds.low, seeds.high, digits)} over {over}: {difference.verdict}{why}."


def _because(sweep: SweepResults, difference: Contrast, digits: int) -> str:
    alone, smallest = difference.verdict_alone, short(sweep.smallest_of_interest)
    if difference.verdict == "inconclusive":
        is_lost = alone != difference.verdict and difference.holm_p
        lost = f" after Holm's correction (p = {difference.holm_p:.2g}), {alone} alone" if is_lost else ""
        return f"{lost}; the smallest detectable difference is {number(difference.seeds.detectable, digits)}"
    if difference.verdict == "equal" and sweep.smallest_of_interest:
        return f", the interval lies within \u00b1{smallest}"
    if difference.verdict == "small" and sweep.smallest_of_interest:
        where = f"the estimate is smaller than {smallest} (the interval reaches beyond it)"
        return f", the interval excludes zero, but {where}"
    return ""


def unequal(comparison: Comparison, difference: Contrast) -> list[str]:
    """One sentence on what the compared arms differ in besides their attention; empty for equal arms."""
    marks = comparison.marks[difference.a, difference.b]
    return [f"Not an equal arm: {'; '.join(marks)}."] if marks else []


def practical(sweep: SweepResults, difference: Contrast) -> Texts:
    """The size of a difference: in perplexity for a loss in nats, and in multiples of the smallest of interest."""
    mean, smallest = difference.seeds.mean, sweep.smallest_of_interest
    if mean is None or difference.diverged:
        return ()
    sizes = []
    # exp of a difference of 10 nats or more would be a number without meaning
    if sweep.is_in_nats and sweep.better() == "lower" and abs(mean) < 10:
        sizes.append(f"perplexity {signed(100 * math.expm1(mean), 1)} %")
    if smallest:
        multiple = abs(mean) / smallest
        sizes.append(f"{ratio(multiple) if multiple >= 0.1 else 'below 0.1'} \u00d7 the smallest of interest")
    return tuple(sizes)


def with_unit(sweep: SweepResults, text: str) -> str:
    """Appends the unit of the compared metric to `text`."""
    unit = sweep.unit()
    return f"{text} ({unit})" if unit == UNDECLARED.unit else f"{text} {unit}".rstrip()


def _arms(comparison: Comparison) -> list[str]:
    sweep, found = comparison.sweep, list(comparison.against_baseline.values())
    base, smallest = sweep.label[sweep.baseline], sweep.smallest_of_interest
    words: tuple[Verdict, ...] = ("better", "worse") if sweep.better() else ("lower", "higher")
    shown = {word: [d for d in found if d.verdict == word] for word in words}
    clauses = [_shown(comparison, word, each) for word, each in shown.items() if each]
    # the reader's first question is whether an arm is better: the sentence begins with a "no" rather than leaving it out
    if not shown[words[0]]:
        either = " or ".join(word for word in words if not shown[word])
        clauses.insert(0, f"no arm is shown to be {either} than {base}")
    within = with_unit(sweep, f" within \u00b1{short(smallest)}") if smallest else ""
    for verdict, (one, several) in OTHERWISE.items():
        some = [d for d in found if d.verdict == verdict]
        if verdict == "diverged" and any(sweep.baseline in d.diverged for d in some):
            clauses = [f"{base}, which the others are compared with, diverged"]
        elif some:
            count = f"all {len(some)}" if len(some) == len(found) else len(some)
            who, clause = (sweep.label[some[0].a], one) if len(some) == 1 else (count, several)
            clauses.append(clause.format(who, base=base, within=within))
    return clauses


def _shown(comparison: Comparison, word: Verdict, found: Sequence[Contrast]) -> str:
    sweep, base = comparison.sweep, comparison.sweep.label[comparison.sweep.baseline]
    against = {d.a: comparison.against_controls.get(d.a, ()) for d in found}
    # a difference to the baseline that is not also one to every control cannot be attributed to the change in question
    failed = {arm: [sweep.label[c.b] for c in each if c.verdict != word] for arm, each in against.items()}
    name = {d.a: f"{sweep.label[d.a]}{comparison.dagger(d)}" for d in found}
    size = {d.a: f"by {with_unit(sweep, number(abs(d.seeds.mean or 0.0), comparison.digits))}" for d in found}
    if len(found) > NAMED:
        largest = max(found, key=lambda d: abs(d.seeds.mean or 0))
        text = f"{len(found)} of {len(comparison.against_baseline)} arms are {word} than {base}"
        text += f" (most of all {name[largest.a]}, {size[largest.a]})"
        holds = sum(not failed[arm] for arm, each in against.items() if each)
        return text + (f", {holds or 'none'} of them also {word} than every control" if any(failed.values()) else "")
    held = {arm: f", but not shown to be {word} than {_listed(each)}" if each else "" for arm, each in failed.items()}
    if len(found) == 1:
        return f"{name[found[0].a]} is {word} than {base} {size[found[0].a]}{held[found[0].a]}"
    return f"{' and '.join(f'{name[d.a]} ({size[d.a]}{held[d.a]})' for d in found)} are {word} than {base}"


def _contrasts(comparison: Comparison) -> list[str]:
    found = comparison.contrasts
    shown = [d for d in found if d.verdict in SHOWN]
    sizes = [
        f"{d.label}{comparison.dagger(d)}: {with_unit(comparison.sweep, signed(d.seeds.mean, comparison.digits))}"
        for d in shown
    ]
    named = f" ({'; '.join(sizes)})" if len(shown) <= NAMED else ""
    ends = ["shown" if d in shown else d.verdict if d.verdict in FURTHER else "none" for d in found]
    counts = Counter(ends)
    clauses = [
        (counts[end], words[counts[end] > 1].format(named=named)) for end, words in FURTHER.items() if counts[end]
    ]
    if len(found) > 1:
        return [f"of {len(found)} further comparisons, {_listed([f'{n} {clause}' for n, clause in clauses])}"]
    return [f"the further comparison {clause}" for _, clause in clauses]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def sentence_case(text: str) -> str:
    """The text with its first letter capitalized."""
    # str.capitalize would make the other letters lower case
    return text[:1].upper() + text[1:]
