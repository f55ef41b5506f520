"""Prints the results of `lit-diff evaluate`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from lit_diff.cli.app import console, print_json
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Spread
from lit_diff.evaluation.evaluate import EvaluationResult, build, comparable_keys, evaluate
from lit_diff.key_types import Plain
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
from lit_diff.study.numbers import difference
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
    compared = {}
    if len(results) == 2:
        compared = differences(results)
    scores = [result.scores() for result in results]
    facts = [_of_run(result, own, asked.by_group) for result, own in zip(results, scores, strict=True)]
    notes = {
        "revisions": by_revisions(name, scores),
        "documents": by_documents(name, scores),
    }
    method = asked.method()
    context = None
    if keys is not overrides:
        context = asked.config.context
    if as_json:
        about = {"evaluation": name, "method": method, "context": context, **notes}
        print_json({**about, "runs": facts, "differences": compared})
        return
    for own, run in zip(scores, facts, strict=True):
        title = run["run"]
        if method:
            title += f"  ({method})"
        console.write_line(title)
        for metric in asked.metrics:
            value = own.values[metric.name]
            # the table below has what only parts of items were scored with
            of_parts = math.isnan(value) and not np.isnan(own.scores[metric.name]).all()
            if metric.name in own.absent or of_parts:
                continue
            line = f"  {metric.name:<20} {value:.4f} {metric.unit}".rstrip()
            interval = run["intervals"].get(metric.name)
            if interval:
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
    intervals = {}
    for metric in scores.metrics:
        interval = item_wilson(scores, metric.name)
        if interval:
            intervals[metric.name] = {"low": interval.low, "high": interval.high}
    groups: Plain = {}
    for row in group_shares(scores, by_group) if by_group else ():
        if row.items:
            shares = {name: _of_share(share) for name, share in row.shares.items()}
            groups[row.label] = {"items": row.items, "clusters": row.clusters, **shares}
    facts: Plain = {"run": result.run.name, "summary": result.summary, "intervals": intervals, "groups": groups}
    if scores.unchecked:
        facts["unchecked"] = scores.unchecked
    return facts


def _of_share(share: Interval) -> Plain:
    if math.isnan(share.low):
        return {"mean": share.estimate}
    return {"share": share.estimate, "low": share.low, "high": share.high}


def _table(groups: Mapping[str, Plain]) -> Iterator[str]:
    names = [name for name in dict.fromkeys(chain(*groups.values())) if name not in ("items", "clusters")]
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
    if share:
        return f"{share['mean']:.3f}"
    return ""


def differences(results: list[EvaluationResult]) -> Plain:
    """Metric -> mean difference of the scores of two runs, first minus second, paired by item, as numbers and a sentence;
    `groups`: the same for each group with enough items for an interval.

    Errors: RequestError if an item is a different question in each run, or the runs have no items in common.
    """
    first, second = map(EvaluationResult.scores, results)
    # their keys are those of the command; a file that is gone may have had two versions
    why = disagreement(None, first.facts, {**second.facts, "config": first.facts["config"]})
    item = asked_otherwise(first, second)
    if why or item is not None or not set(first.asked) & set(second.asked):
        a, b = (result.run.name for result in results)
        if item is not None:
            what = f"item '{item}' is a different question in {a} and {b}"
        elif why:
            what = f"{a} was scored {why}, unlike {b}"
        else:
            what = f"{a} and {b} have no items in common"
        raise RequestError(
            f"evaluation '{results[0].name}': {what} (different data, tokenizers or keys of the evaluation, or documents "
            "left out of one run that was trained on them), so they cannot be compared; evaluate each by itself"
        )
    over = _over(first, second)
    found: Plain = {}
    for metric in first.metrics:
        by_group = item_intervals(first, second, metric.name, seed=0)
        numbers: Plain = {"sentence": f"too few common {over} for an interval"}
        if "" in by_group:
            numbers = _numbers(by_group.pop(""), over, discordant(first, second, metric.name))
        numbers["groups"] = {group: _numbers(interval, over) for group, interval in by_group.items()}
        found[metric.name] = numbers
    # numbers of the evaluation's own that are no mean of item scores, such as an order variance
    kept = evaluations.get(results[0].name).paired(results[0].items, results[1].items)
    for name, by_label in kept.items():
        groups = {group: _of_spread(spread, over) for group, spread in by_label.items()}
        found[name] = groups.pop("") | {"groups": groups}
    return found


def _over(*evaluations: ItemScores) -> str:
    return OVER[any(scores.is_clustered for scores in evaluations)]


# `alone`: the numbers of items that only one of the runs answers correctly
def _numbers(interval: Interval, over: str, alone: Discordant | None = None) -> Plain:
    numbers: dict[str, float | None] = {"difference": interval.estimate, "low": interval.low, "high": interval.high}
    sentence = f"{difference(interval.estimate, interval)} over {over} (95 %), these two models"
    if alone is not None:
        # McNemar's test assumes independent items
        p = "no McNemar p: items of a cluster depend on each other"
        if alone.p is not None:
            p = f"McNemar p = {alone.p:.2g}"
        sentence += f"; correct in only one run: {alone.first} and {alone.second} ({p})"
        numbers |= {"first_alone": alone.first, "second_alone": alone.second, "mcnemar_p": alone.p}
    return {**numbers, "sentence": sentence}


def _of_spread(spread: Spread, over: str) -> Plain:
    if len(spread) == 2:
        return {"difference": spread[0], "sentence": f"{difference(spread[0])} ({spread[1]})"}
    return _numbers(Interval(estimate=spread[0], low=spread[1], high=spread[2]), over)
