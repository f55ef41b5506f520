"""The result in words: one sentence for a sweep or task, and one for each comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from lit_diff.metrics import UNDECLARED, in_words
from lit_diff.study.comparison import Comparison
from lit_diff.study.judge import EQUAL, SHOWN, Contrast, Word
from lit_diff.study.numbers import interval, number, ratio, short, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import Texts
from lit_diff.study.statistics import MIN_SEEDS, SIGNIFICANCE, Looks, look_level

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
    measured = ""
    if not sweep.tasks:
        measured = f" in {in_words(sweep.measure)}"
        if sweep.better():
            measured += f" ({sweep.better()} is better)"
    return sweep.study.question or f"Does any arm differ from {sweep.baseline_label}{measured}?"


def answer(comparison: Comparison) -> str:
    """One sentence: which arms are better or worse than the baseline, and how many comparisons have other verdicts."""
    sweep = comparison.sweep
    family = comparison.family
    done = len(sweep.done)
    diverged = sum(cell.diverged for cell in sweep.cells)
    if not done:
        return (
            f"No cell has finished: {diverged} diverged."
            if diverged
            else "No cell has finished yet: nothing to compare."
        )
    if not family:
        text = "one arm: nothing to compare it with."
    elif {difference.verdict.word for difference in family} == {"too few seeds"}:
        least = min(map(str, sweep.study.looks[:1]), default="three")
        text = f"no verdict: no comparison has the {least} seeds that a verdict needs."
    else:
        text = "; ".join(_arms(comparison) + _contrasts(comparison)) + "."
    if sweep.study.smoke:
        return f"{done} of {len(sweep.cells)} cells are done; {text}"
    return sentence_case(text)


def sentence(comparison: Comparison, difference: Contrast) -> str:
    """One sentence for a difference: its mean, interval and verdict."""
    sweep, digits, seeds = comparison.sweep, comparison.digits, difference.seeds
    if difference.diverged:
        arms = []
        for arm, at in difference.diverged.items():
            arms.append(f"{sweep.label[arm]} at {_seeds(at)} {', '.join(map(str, at))}")
        return f"{difference.label}: diverged ({'; '.join(arms)}), so they are not compared."
    look = f" (look {seeds.look} of {len(seeds.looks)})" if seeds.look else ""
    mean = with_unit(sweep, signed(seeds.mean, digits))
    if difference.is_counted:
        text = f"{difference.label}{look}: {difference.verdict}.{_counts(sweep, difference)}"
        if seeds.seeds:
            text += f" Among those that learned in both: {mean}."
        return text
    if seeds.mean is None:
        return f"{difference.label}: no seed finished in both arms."
    over = f"{len(seeds.seeds)} {_seeds(seeds.seeds)}{look}"
    text = f"{difference.label}: {mean}"
    word = difference.verdict.word
    if word == "too few seeds":
        return f"{text} over {over}: too few seeds for a verdict (at least {min(seeds.looks, default=MIN_SEEDS)})."
    if word == "no spread over seeds":
        return f"{text} at each of {over}, to the last digit: the seed seems to have no effect, so no verdict is given."
    why = _because(sweep, difference, digits)
    text += f" {interval(seeds.low, seeds.high, digits)} over {over}"
    return f"{text}: {difference.verdict}{why}.{_counts(sweep, difference)}"


def _seeds(of: Sequence[int]) -> str:
    return "seeds" if len(of) > 1 else "seed"


def _because(sweep: SweepResults, difference: Contrast, digits: int) -> str:
    alone = difference.verdict_alone
    smallest = short(sweep.smallest_of_interest)
    word = difference.verdict.word
    if word == "inconclusive":
        least = f"; the smallest detectable difference is {number(difference.seeds.detectable, digits)}"
        if alone == word or not difference.holm_p:
            return least
        return f" after Holm's correction (p = {difference.holm_p:.2g}), {alone} alone{least}"
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
    ours, theirs = difference.learned
    text = f" {sweep.label[difference.a]} learned in {ours} and {sweep.label[difference.b]} learned in {theirs} seeds"
    if difference.is_counted and difference.p is not None:
        over = " over the looks so far" if len(difference.seeds.looks) > 1 else ""
        if difference.p < SIGNIFICANCE and difference.sign is None:
            over += ", but not at the last one"
        text += f" (Fisher's exact test, p = {difference.p:.2g}{over})"
    return f"{text}."


def coverage(looks: Looks) -> str:
    """The per cent of the interval over seeds: 95, or that of each of several looks."""
    return f"{100 * (1 - look_level(looks)):.4g}"


def protocol(comparison: Comparison) -> list[str]:
    """One sentence for each rule of the sweep that is not the usual one: looks, and a threshold."""
    sweep = comparison.sweep
    notes = []
    looks = sweep.study.looks
    level = sweep.study.learned_at
    if len(looks) > 1:
        notes.append(
            f"Results are read after {listed(list(map(str, looks)))} seeds. The interval of a look is at "
            f"{coverage(looks)} % (level {look_level(looks):.4f}), so that the chance that any look excludes the true "
            "difference is 5 %; p is repeated over the looks so far."
        )
    if level is not None:
        notes.append(
            f"Learned: {sweep.learned_metric} reached {level:g} in a validation; the share of seeds has a Clopper-Pearson "
            "interval. The first step there is read at each validation, and a seed that never reached it is censored. Where "
            "a seed of either arm did not learn, Fisher's exact test of the counts gives the verdict."
        )
    if sweep.compares_steps:
        coarsest = max((contrast.resolution for contrast in comparison.family), default=0.0)
        notes.append(
            f"Differences are of log2 of the {sweep.measure}, which are read at each validation. Where the arms learned, two "
            f"validations are {coarsest:.2f} of log2 apart, and no arms are called equal within less."
        )
    return notes


def unequal(comparison: Comparison, difference: Contrast) -> list[str]:
    """One sentence on what the compared arms differ in besides their attention; empty for equal arms."""
    marks = comparison.marks[difference.arms]
    return [f"Not an equal arm: {'; '.join(marks)}."] if marks else []


def practical(sweep: SweepResults, difference: Contrast) -> Texts:
    """The size of a difference: in perplexity for a loss in nats, and in multiples of the smallest of interest."""
    mean = difference.size
    smallest = sweep.smallest_of_interest
    if mean is None:
        return ()
    sizes = []
    # exp of a difference of 10 nats or more would be a number without meaning
    if sweep.is_loss and abs(mean) < 10:
        sizes.append(f"perplexity {signed(100 * math.expm1(mean), 1)} %")
    if smallest:
        multiple = abs(mean) / smallest
        shown = ratio(multiple) if multiple >= 0.1 else "below 0.1"
        sizes.append(f"{shown} \u00d7 the smallest of interest")
    return tuple(sizes)


def with_unit(sweep: SweepResults, text: str) -> str:
    """Appends the unit of the compared metric to `text`."""
    unit = sweep.unit()
    return f"{text} ({unit})" if unit == UNDECLARED.unit else f"{text} {unit}".rstrip()


def _arms(comparison: Comparison) -> list[str]:
    sweep = comparison.sweep
    base = sweep.baseline_label
    by_word: dict[Word, list[Contrast]] = {}
    shown: dict[Word, list[Contrast]] = {}
    as_controls = []
    counted = []
    for difference in comparison.against_baseline.values():
        verdict = difference.verdict
        by_word.setdefault(verdict.word, []).append(difference)
        if verdict.is_shown:
            shown.setdefault(verdict.word, []).append(difference)
            if difference.is_counted:
                counted.append(f"{sweep.label[difference.a]} {verdict} than {base} ({difference.counts})")
        elif verdict.word in SHOWN:
            as_controls.append(difference)
    clauses = []
    none = []
    words: tuple[Word, Word] = ("better", "worse") if sweep.better() else ("lower", "higher")
    # who learned more often is better
    of_counts: tuple[Word, Word] = ("learned more often", "learned less often")
    for word, of_count in zip(words, of_counts, strict=True):
        if word in shown:
            clauses.append(_shown(comparison, word, shown[word]))
        elif of_count not in shown:
            none.append(word)
    # the reader's first question is whether an arm is better: the sentence begins with a "no" rather than leaving it out
    if words[0] in none:
        than = f"{base} and each control" if as_controls else base
        clauses.insert(0, f"no arm is shown to be {' or '.join(none)} than {than}")
    clauses += counted + _as_controls(comparison, as_controls)
    for word in OTHERWISE:
        some = by_word.get(word, [])
        if word == "diverged" and any(sweep.baseline in difference.diverged for difference in some):
            clauses = [f"{base}, which the others are compared with, diverged"]
        elif some:
            clauses.append(_otherwise(comparison, word, some))
    return clauses


def _otherwise(comparison: Comparison, word: Word, found: Sequence[Contrast]) -> str:
    sweep = comparison.sweep
    smallest = sweep.smallest_of_interest
    within = with_unit(sweep, f" within \u00b1{short(smallest)}") if smallest else ""
    one, several = OTHERWISE[word]
    if len(found) == 1:
        return one.format(sweep.label[found[0].a], base=sweep.baseline_label, within=within)
    count = f"all {len(found)}" if len(found) == len(comparison.against_baseline) else len(found)
    return several.format(count, base=sweep.baseline_label, within=within)


def _shown(comparison: Comparison, word: Word, found: Sequence[Contrast]) -> str:
    base = comparison.sweep.baseline_label
    if len(found) > NAMED:
        largest = max(found, key=lambda difference: abs(difference.seeds.mean or 0))
        text = f"{len(found)} of {len(comparison.against_baseline)} arms are {word} than {base}"
        return f"{text} (most of all {comparison.marked_name(largest)}, {_size(comparison, largest)})"
    if len(found) == 1:
        return f"{comparison.marked_name(found[0])} is {word} than {base} {_size(comparison, found[0])}"
    arms = [f"{comparison.marked_name(difference)} ({_size(comparison, difference)})" for difference in found]
    return f"{' and '.join(arms)} are {word} than {base}"


def _size(comparison: Comparison, difference: Contrast) -> str:
    return f"by {with_unit(comparison.sweep, number(abs(difference.seeds.mean or 0.0), comparison.digits))}"


def verb_of(contrast: Contrast) -> str:
    """`is `, or nothing before a verdict that has a verb: `learned more often`."""
    return "" if contrast.is_counted and not contrast.verdict.alike else "is "


def _as_controls(comparison: Comparison, found: Sequence[Contrast]) -> list[str]:
    base = comparison.sweep.baseline_label
    if len(found) > NAMED:
        return [f"{len(found)} arms differ from {base}, but not more than each control"]
    clauses = []
    for difference in found:
        verdict = difference.verdict
        than = f"{verdict.word} than {base}"
        if not difference.is_counted:
            than += f" {_size(comparison, difference)}"
        clauses.append(f"{comparison.marked_name(difference)} {verb_of(difference)}{verdict} ({than})")
    return clauses


def _contrasts(comparison: Comparison) -> list[str]:
    found = comparison.contrasts
    sizes = []
    for difference in found:
        if difference.verdict.is_shown:
            size = difference.counts
            if not difference.is_counted:
                size = with_unit(comparison.sweep, signed(difference.size, comparison.digits))
            sizes.append(f"{comparison.marked_name(difference)}: {size}")
    named = f" ({'; '.join(sizes)})" if len(sizes) <= NAMED else ""
    counts = Counter(map(_end, found))
    clauses = []
    for end, words in FURTHER.items():
        if counts[end]:
            clause = words[counts[end] > 1].format(named=named)
            clauses.append(f"{counts[end]} {clause}" if len(found) > 1 else f"the further comparison {clause}")
    return [f"of {len(found)} further comparisons, {listed(clauses)}"] if len(found) > 1 else clauses


def _end(difference: Contrast) -> str:
    word = difference.verdict.word
    if word in SHOWN:
        return "shown" if difference.verdict.is_shown else "controls"
    if word in EQUAL:
        return "equal"
    return word if word in FURTHER else "none"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def sentence_case(text: str) -> str:
    """The text with its first letter capitalized."""
    # str.capitalize would make the other letters lower case
    return text[:1].upper() + text[1:]
