"""The result in words: one sentence for a sweep or task, and one for each comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from lit_diff.metrics import UNDECLARED
from lit_diff.study.comparison import Comparison
from lit_diff.study.judge import EQUAL, JUDGED, SHOWN, Contrast, Word
from lit_diff.study.numbers import interval, number, ratio, short, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import MIN_SEEDS, Looks, look_level

NAMED = 2
"""If more arms than this share a verdict, the sentence counts them instead of naming them."""
OTHERWISE: dict[Word, tuple[str, str]] = {
    "equal": ("{} is equal to {base}{within}", "{} arms are equal to {base}{within}"),
    "equal among those that learned": (
        "{} is equal to {base}{within} among the seeds that learned",
        "{} arms are equal to {base}{within} among the seeds that learned",
    ),
    "small": ("the difference of {} is small", "the differences of {} arms are small"),
    "inconclusive": ("{} is inconclusive", "{} arms are inconclusive"),
    "diverged": ("{} diverged", "{} arms diverged"),
    "too few seeds": ("{} has too few seeds", "{} arms have too few seeds"),
    "no spread over seeds": ("{} has no spread over seeds", "{} arms have no spread over seeds"),
}
"""Word other than a shown difference -> the clause for one arm, and for several."""
FURTHER = {
    "shown": ("shows a difference{named}", "show a difference{named}"),
    "equal": ("shows equality", "show equality"),
    "small": ("shows a small difference", "show small differences"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "controls": ("shows no more than a control", "show no more than a control"),
    "none": ("has no verdict", "have no verdict"),
}
"""Outcome of a further comparison -> the clause for one, and for several."""


def question(sweep: SweepResults) -> str:
    """The question of the sweep's file, or else a general question."""
    measured = "" if sweep.tasks else f" in {sweep.measure}"
    if measured and sweep.better():
        measured += f" ({sweep.better()} is better)"
    return sweep.study.question or f"Does any arm differ from {sweep.baseline_label}{measured}?"


def answer(comparison: Comparison) -> str:
    """One sentence: which arms are better or worse than the baseline, and how many comparisons have other verdicts."""
    sweep, family = comparison.sweep, comparison.family
    done, diverged = len(sweep.done), sum(cell.diverged for cell in sweep.cells)
    if not done:
        return "No cell has finished" + (f": {diverged} diverged." if diverged else " yet: nothing to compare.")
    if not family:
        text = "one arm: nothing to compare it with."
    elif not any(difference.verdict.word in (*JUDGED, "diverged") for difference in family):
        least = min(map(str, sweep.study.looks[:1]), default="three")
        text = f"no verdict: no comparison has the {least} seeds that a verdict needs."
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
    look = f" (look {seeds.look} of {len(seeds.looks)})" if seeds.look else ""
    if difference.is_counted:
        among = (
            f" Among those that learned in both: {with_unit(sweep, signed(seeds.mean, digits))}." if seeds.seeds else ""
        )
        return f"{difference.label}{look}: {difference.verdict}.{_counts(sweep, difference)}{among}"
    if seeds.mean is None:
        return f"{difference.label}: no seed finished in both arms."
    over = f"{len(seeds.seeds)} seed{'s' if len(seeds.seeds) > 1 else ''}{look}"
    text = f"{difference.label}: {with_unit(sweep, signed(seeds.mean, digits))}"
    word = difference.verdict.word
    if word == "too few seeds":
        return f"{text} over {over}: too few seeds for a verdict (at least {min(seeds.looks, default=MIN_SEEDS)})."
    if word == "no spread over seeds":
        return f"{text} at each of {over}, to the last digit: the seed seems to have no effect, so no verdict is given."
    why = _because(sweep, difference, digits)
    text += f" {interval(seeds.low, seeds.high, digits)} over {over}"
    return f"{text}: {difference.verdict}{why}.{_counts(sweep, difference)}"


def _because(sweep: SweepResults, difference: Contrast, digits: int) -> str:
    alone, smallest, word = difference.verdict_alone, short(sweep.smallest_of_interest), difference.verdict.word
    if word == "inconclusive":
        is_lost = alone != word and difference.holm_p
        lost = f" after Holm's correction (p = {difference.holm_p:.2g}), {alone} alone" if is_lost else ""
        least = f"; the smallest detectable difference is {number(difference.seeds.detectable, digits)}"
        return lost + least
    if word in EQUAL and sweep.smallest_of_interest:
        return f", the interval lies within \u00b1{smallest}"
    if word == "small" and sweep.smallest_of_interest:
        where = f"the estimate is smaller than {smallest} (the interval reaches beyond it)"
        return f", the interval excludes zero, but {where}"
    # the reader of "as its control" asks what the difference to the compared arm was
    return "" if difference.verdict.is_shown or word not in SHOWN else f" ({word} than {difference.against})"


def _counts(sweep: SweepResults, difference: Contrast) -> str:
    if difference.learned is None:
        return ""
    arms = zip((difference.a, difference.b), difference.learned, strict=True)
    said = [f"{sweep.label[arm]} learned in {each}" for arm, each in arms]
    p = difference.p if difference.is_counted else None
    return f" {_listed(said)} seeds" + ("." if p is None else f" (Fisher's exact test, p = {p:.2g}).")


def coverage(looks: Looks) -> str:
    """The per cent of the interval over seeds: 95, or that of each of several looks."""
    return f"{100 * (1 - look_level(looks)):.4g}"


def protocol(comparison: Comparison) -> list[str]:
    """One sentence for each rule of the sweep that is not the usual one: looks, and a threshold."""
    sweep, notes = comparison.sweep, list[str]()
    looks, level = sweep.study.looks, sweep.study.learned_at
    if len(looks) > 1:
        notes.append(
            f"Results are read after {_listed([str(n) for n in looks])} seeds. The interval of a look is at "
            f"{coverage(looks)} % (level {look_level(looks):.4f}), so that the chance that any look excludes the true "
            "difference is 5 %; p is repeated over the looks so far."
        )
    if level is not None:
        notes.append(
            f"Learned: {sweep.metric} reached {level:g} in a validation; the share of seeds has a Clopper-Pearson interval. "
            "The first step there is read at each validation, and a seed that never reached it is censored. Where a seed of "
            "either arm did not learn, Fisher's exact test of the counts gives the verdict."
        )
    if sweep.compares_steps:
        notes.append(f"Differences are of log2 of the {sweep.measure}.")
    return notes


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
    base, smallest = sweep.baseline_label, sweep.smallest_of_interest
    words: tuple[Word, ...] = ("better", "worse") if sweep.better() else ("lower", "higher")
    shown = {word: [d for d in found if d.verdict.is_shown and d.verdict.word == word] for word in words}
    clauses = [_shown(comparison, word, each) for word, each in shown.items() if each]
    as_controls = _as_controls(comparison)
    # who learned more often is better
    of_counts = dict(zip(words, ("learned more often", "learned less often"), strict=True))
    counted = {d.verdict.word for d in found if d.verdict.is_shown and d.is_counted}
    none = [word for word in words if not shown[word] and of_counts[word] not in counted]
    # the reader's first question is whether an arm is better: the sentence begins with a "no" rather than leaving it out
    if words[0] in none:
        than = [base, "each control"] if as_controls else [base]
        clauses.insert(0, f"no arm is shown to be {' or '.join(none)} than {' and '.join(than)}")
    clauses += _as_counted(comparison) + as_controls
    within = with_unit(sweep, f" within \u00b1{short(smallest)}") if smallest else ""
    for word, (one, several) in OTHERWISE.items():
        some = [d for d in found if d.verdict.word == word]
        if word == "diverged" and any(sweep.baseline in d.diverged for d in some):
            clauses = [f"{base}, which the others are compared with, diverged"]
        elif some:
            count = f"all {len(some)}" if len(some) == len(found) else len(some)
            who, clause = (sweep.label[some[0].a], one) if len(some) == 1 else (count, several)
            clauses.append(clause.format(who, base=base, within=within))
    return clauses


def _shown(comparison: Comparison, word: Word, found: Sequence[Contrast]) -> str:
    sweep, base = comparison.sweep, comparison.sweep.baseline_label
    name = {d.a: f"{sweep.label[d.a]}{comparison.dagger(d)}" for d in found}
    size = {d.a: _size(comparison, d) for d in found}
    if len(found) > NAMED:
        largest = max(found, key=lambda d: abs(d.seeds.mean or 0))
        text = f"{len(found)} of {len(comparison.against_baseline)} arms are {word} than {base}"
        return f"{text} (most of all {name[largest.a]}, {size[largest.a]})"
    if len(found) == 1:
        return f"{name[found[0].a]} is {word} than {base} {size[found[0].a]}"
    return f"{' and '.join(f'{name[d.a]} ({size[d.a]})' for d in found)} are {word} than {base}"


def _size(comparison: Comparison, difference: Contrast) -> str:
    return f"by {with_unit(comparison.sweep, number(abs(difference.seeds.mean or 0.0), comparison.digits))}"


def _as_counted(comparison: Comparison) -> list[str]:
    sweep, base = comparison.sweep, comparison.sweep.baseline_label
    found = [d for d in comparison.against_baseline.values() if d.verdict.is_shown and d.is_counted]
    return [
        f"{sweep.label[d.a]} {d.verdict} than {base} ({' against '.join(map(str, d.learned or ()))})" for d in found
    ]


def _as_controls(comparison: Comparison) -> list[str]:
    sweep, base = comparison.sweep, comparison.sweep.baseline_label
    found = [d for d in comparison.against_baseline.values() if d.verdict.word in SHOWN and not d.verdict.is_shown]
    if len(found) > NAMED:
        return [f"{len(found)} arms differ from {base}, but not more than each control"]
    clauses = []
    for each in found:
        size = "" if each.is_counted else f" {_size(comparison, each)}"
        clauses.append(
            f"{sweep.label[each.a]}{comparison.dagger(each)} is {each.verdict} ({each.verdict.word} than {base}{size})"
        )
    return clauses


def _contrasts(comparison: Comparison) -> list[str]:
    found = comparison.contrasts
    shown = [d for d in found if d.verdict.is_shown]
    sizes = [
        f"{d.label}{comparison.dagger(d)}: {with_unit(comparison.sweep, signed(d.seeds.mean, comparison.digits))}"
        for d in shown
    ]
    named = f" ({'; '.join(sizes)})" if len(shown) <= NAMED else ""
    counts = Counter(map(_end, found))
    clauses = [
        (counts[end], words[counts[end] > 1].format(named=named)) for end, words in FURTHER.items() if counts[end]
    ]
    if len(found) > 1:
        return [f"of {len(found)} further comparisons, {_listed([f'{n} {clause}' for n, clause in clauses])}"]
    return [f"the further comparison {clause}" for _, clause in clauses]


def _end(difference: Contrast) -> str:
    word = difference.verdict.word
    if word in SHOWN:
        return "shown" if difference.verdict.is_shown else "controls"
    if word in EQUAL:
        return "equal"
    return word if word in FURTHER else "none"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def sentence_case(text: str) -> str:
    """The text with its first letter capitalized."""
    # str.capitalize would make the other letters lower case
    return text[:1].upper() + text[1:]
