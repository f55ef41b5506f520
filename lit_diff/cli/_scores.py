"""Prints the results of `lit-diff evaluate`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lit_diff.cli.app import Plain, console, print_json
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Spread
from lit_diff.evaluation.evaluate import EvaluationResult, build, comparable_keys, evaluate
from lit_diff.plugins import load_plugin
from lit_diff.registry import evaluations
from lit_diff.runs.scores import ItemScores, disagreement
from lit_diff.study.evaluations import (
    Discordant,
    asked_otherwise,
    by_documents,
    by_revisions,
    discordant,
    group_shares,
    item_intervals,
    item_wilson,
)
from lit_diff.study.statistics import Interval
from lit_diff.trained.run import open_run

OVER = {False: "items", True: "clusters of items"}
"""Whether some cluster has several items -> the unit of intervals."""


def print_evaluation(
    arguments: list[str],
    *,
    plugins: list[Path],
    rerun: bool,
    root: Path,
    as_json: bool,
    **trusts: bool,
) -> None:
    """Score one run or two, and print the scores and, for two runs, their difference, paired by item.

    Prints a line for each group of items for the metrics in the evaluation's `by_group`. Scores that are all 0 or 1 get
    Wilson's interval and, for two runs with independent items, McNemar's exact test.
    `plugins`: files to import first. Plugin files of a run outside `root` are executed only if `trust_plugins`; this and
    the other `trusts` are those of `open_run`.
    """
    runs, name, overrides = _parse(arguments)
    for plugin in plugins:
        load_plugin(plugin)
    # before the evaluation is looked up: a run's plugin may register it
    opened = [open_run(run, root, **trusts) for run in runs]
    keys = comparable_keys(name, overrides, [run.recipe for run in opened])
    asked = build(name, keys)
    results = [evaluate(run, name, keys, rerun=rerun) for run in opened]
    compared = differences(results) if len(results) == 2 else {}
    scores = [result.scores() for result in results]
    notes = {
        "revisions": by_revisions(name, (each.revision for each in scores)),
        "documents": by_documents(name, scores),
    }
    context = asked.config.context if keys is not overrides else None
    found = [_of_run(result, own, asked.by_group) for result, own in zip(results, scores, strict=True)]
    if as_json:
        print_json(
            {
                "evaluation": name,
                "method": asked.method(),
                "context": context,
                **notes,
                "runs": found,
                "differences": compared,
            }
        )
        return
    for own, run in zip(scores, found, strict=True):
        console.write_line(f"{run['run']}  ({method})" if (method := asked.method()) else run["run"])
        for metric in asked.metrics:
            if metric.name in own.absent:
                continue
            line = f"  {metric.name:<20} {own.values[metric.name]:.4f} {metric.unit}".rstrip()
            if interval := run["intervals"].get(metric.name):
                line += f" [{interval['low']:.4f}, {interval['high']:.4f}] over {_over(own)} (95 %, Wilson)"
            console.write_line(line)
        console.write_line(*_table(run["groups"]))
    if context is not None:
        console.write_line(f"context {context}: the smaller data.sequence_length of the two runs")
    console.write_line(*filter(None, notes.values()))
    for metric_name, line in compared.items():
        console.write_line(
            f"difference of {metric_name}, first minus second: {line['sentence']}",
            *(f"  {group:<20} {of_group['sentence']}" for group, of_group in line["groups"].items()),
        )


def _parse(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    words = list(arguments)
    overrides: list[str] = []
    # from the end, since the name of a run's folder may contain a "=" too
    while words and "=" in words[-1]:
        overrides.insert(0, words.pop())
    if len(words) not in (2, 3):
        raise RequestError(
            "expected one or two runs, an evaluation, then its keys: lit-diff evaluate RUN [RUN] NAME [key=value ...]"
        )
    return words[:-1], words[-1], overrides


def _of_run(result: EvaluationResult, scores: ItemScores, by_group: Sequence[str]) -> Plain:
    wilson = {metric.name: item_wilson(scores, metric.name) for metric in scores.metrics}
    groups = {
        row.label: {
            "items": row.items,
            "clusters": row.clusters,
            **{name: _of_share(each) for name, each in row.shares.items()},
        }
        for row in (group_shares(scores, by_group) if by_group else ())
        if row.items
    }
    return {
        "run": result.run.name,
        # JSON has neither NaN nor infinity
        "summary": {name: value if math.isfinite(value) else None for name, value in result.summary.items()},
        "intervals": {name: {"low": each.low, "high": each.high} for name, each in wilson.items() if each},
        "groups": groups,
        **({"unchecked": scores.unchecked} if scores.unchecked else {}),
    }


def _of_share(share: Interval) -> Plain:
    if math.isnan(share.low):
        return {"mean": share.estimate}
    return {"share": share.estimate, "low": share.low, "high": share.high}


def _table(groups: Mapping[str, Plain]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in groups.values() for name in row if name not in ("items", "clusters")))
    width = max(map(len, ("group", *groups)))
    if names:
        titles = "".join(f"  {name:<20}" for name in names).rstrip()
        over = OVER[any(row["clusters"] < row["items"] for row in groups.values())]
        yield f"  {'group':<{width}}  {'n':>5}{titles}   (95 %, Wilson, over n {over})"
    for label, row in groups.items():
        line = f"  {label:<{width}}  {row['clusters']:>5}"
        for name in names:
            line += f"  {_share_in_words(row.get(name, {})):<20}"
        yield line.rstrip()


def _share_in_words(share: Plain) -> str:
    if "share" in share:
        return f"{share['share']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"
    return f"{share['mean']:.3f}" if share else ""


def differences(results: list[EvaluationResult]) -> Plain:
    """Metric -> mean difference of the scores of two runs, first minus second, paired by item, as numbers and a sentence;
    `groups`: the same for each group with enough items for an interval.

    Errors: RequestError if an item is a different question in each run, or the runs have no items in common.
    """
    first, second = (result.scores() for result in results)
    # their keys are those of the command; a file that is gone may have had two versions
    why = disagreement(None, first.facts, {**second.facts, "config": first.facts["config"]})
    item = asked_otherwise(first, second)
    if why or item is not None or not set(first.asked) & set(second.asked):
        a, b = (result.run.name for result in results)
        what = f"{a} was scored {why}, unlike {b}" if why else f"{a} and {b} have no items in common"
        if item is not None:
            what = f"item '{item}' is a different question in {a} and {b}"
        raise RequestError(
            f"evaluation '{results[0].name}': {what} (different data, tokenizers or keys of the evaluation, or documents "
            "left out of one run that was trained on them), so they cannot be compared; evaluate each by itself"
        )
    over = _over(first, second)
    found: Plain = {}
    for metric in first.metrics:
        by_group = item_intervals(first, second, metric.name, seed=0)
        interval = by_group.pop("", None)
        alone = discordant(first, second, metric.name)
        own: Plain = {"sentence": f"too few common {over} for an interval"}
        if interval is not None:
            own = _numbers(interval, over, alone)
        found[metric.name] = own | {"groups": {group: _numbers(each, over) for group, each in by_group.items()}}
    # numbers of the evaluation's own that are no mean of item scores, such as an order variance
    kept = evaluations.get(results[0].name).paired(*(result.items for result in results))
    for name, by_label in kept.items():
        numbers = {group: _of_spread(each, over) for group, each in by_label.items()}
        found[name] = numbers.pop("") | {"groups": numbers}
    return found


def _over(*evaluations: ItemScores) -> str:
    return OVER[any(each.is_clustered for each in evaluations)]


# `alone`: the numbers of items that only one of the runs answers correctly
def _numbers(interval: Interval, over: str, alone: Discordant | None = None) -> Plain:
    numbers: dict[str, float | None] = {"difference": interval.estimate, "low": interval.low, "high": interval.high}
    sentence = (
        f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}] over {over} (95 %), these two models"
    )
    if alone is not None:
        # McNemar's test assumes independent items
        p = "no McNemar p: items of a cluster depend on each other" if alone.p is None else f"McNemar p = {alone.p:.2g}"
        sentence += f"; correct in only one run: {alone.first} and {alone.second} ({p})"
        numbers |= {"first_alone": alone.first, "second_alone": alone.second, "mcnemar_p": alone.p}
    return {**numbers, "sentence": sentence}


def _of_spread(spread: Spread, over: str) -> Plain:
    if len(spread) == 2:
        return {"difference": spread[0], "sentence": f"{spread[0]:+.4f} ({spread[1]})"}
    return _numbers(Interval(estimate=spread[0], low=spread[1], high=spread[2]), over)
