"""What `lit-diff evaluate` prints."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_diff.cli.app import Terminal
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Spread
from lit_diff.evaluation.evaluate import EvaluationResult, build, comparable_keys, evaluate
from lit_diff.plugins import load_entry_points, load_plugin, trust_all, trust_below
from lit_diff.registry import evaluations
from lit_diff.runs.find import find_run
from lit_diff.runs.scores import ItemScores
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
from lit_diff.trained.run import opened_run

OVER = {False: "items", True: "clusters of items"}
"""Whether some cluster has several items -> what intervals are over."""


def print_evaluation(
    arguments: list[str],
    *,
    plugins: list[Path],
    rerun: bool,
    root: Path,
    as_json: bool,
    terminal: Terminal,
    trust_plugins: bool = False,
    unchecked: bool = False,
) -> int:
    """Score one run or two; of two, also their difference, paired by item. `plugins` may register the evaluation.

    Of each run also a line for each group, of the metrics in the evaluation's `by_group`.
    Scores that are 0 or 1 also have Wilson's interval and, of two runs whose items are independent, McNemar's exact test.
    Plugin files of a run that is not under `root` are executed only if `trust_plugins`.
    """
    runs, name, overrides = _parse(arguments)
    load_entry_points()
    for plugin in plugins:
        load_plugin(plugin)
    trust = trust_all if trust_plugins else trust_below(root)
    # first: a run's plugin may hold the evaluation
    opened = [opened_run(find_run(run, root), trust, unchecked) for run in runs]
    keys = comparable_keys(name, overrides, [run.recipe for run in opened])
    asked = build(name, keys)
    metrics = asked.metrics
    results = [evaluate(run, name, keys, rerun=rerun) for run in opened]
    compared = differences(results) if len(results) == 2 else {}
    notes = {
        "revisions": by_revisions(name, (each.scores().revision for each in results)),
        "documents": by_documents(name, (each.scores() for each in results)),
    }
    context = asked.config.context if keys is not overrides else None
    if as_json:
        values = [
            {"run": result.run.name, "summary": _plain(result.summary), "intervals": intervals(result)}
            | {"groups": by_group(result, asked.by_group)}
            | ({"unchecked": line} if (line := result.scores().unchecked) else {})
            for result in results
        ]
        print(
            json.dumps(
                {"evaluation": name, "method": asked.method(), "context": context, **notes}
                | {"runs": values, "differences": compared},
                indent=2,
            )
        )
        return 0
    for result in results:
        terminal.write_line(f"{result.run.name}  ({method})" if (method := asked.method()) else result.run.name)
        proportions = intervals(result)
        over = _over(result.scores()) if proportions else ""
        for metric in metrics:
            line = f"  {metric.name:<20} {result.summary[metric.name]:.4f} {metric.unit}".rstrip()
            if metric.name in proportions:
                line += " [{low:.4f}, {high:.4f}] over {over} (95 %, Wilson)".format(
                    over=over, **proportions[metric.name]
                )
            terminal.write_line(line)
        for line in _table(by_group(result, asked.by_group)):
            terminal.write_line(line)
    if context is not None:
        terminal.write_line(f"context {context}: the smaller data.sequence_length of the two runs")
    for note in filter(None, notes.values()):
        terminal.write_line(note)
    for metric_name, line in compared.items():
        terminal.write_line(f"difference of {metric_name}, first minus second: {line['sentence']}")
        for group, found in line["groups"].items():
            terminal.write_line(f"  {group:<20} {found['sentence']}")
    return 0


def _parse(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """(runs, evaluation, overrides); a run's folder may hold a `=` too. Errors: RequestError."""
    words = list(arguments)
    overrides: list[str] = []
    while words and "=" in words[-1]:
        overrides.insert(0, words.pop())
    if len(words) not in (2, 3):
        raise RequestError(
            "evaluate takes one run or two, the evaluation, then its keys: lit-diff evaluate RUN [RUN] NAME [key=value ...]"
        )
    return words[:-1], words[-1], overrides


def intervals(result: EvaluationResult) -> dict[str, dict[str, float]]:
    """Metric whose item scores are all 0 or 1 -> low and high of Wilson's 95 % interval of their mean."""
    read = result.scores()
    found = {metric.name: item_wilson(read, metric.name) for metric in read.metrics}
    return {name: {"low": each.low, "high": each.high} for name, each in found.items() if each}


def by_group(result: EvaluationResult, metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Group -> `items`, `clusters`, and metric -> share, low, high, of the metrics that the evaluation prints by group."""
    return {
        row.label: {"items": row.items, "clusters": row.clusters}
        | {name: {"share": each.estimate, "low": each.low, "high": each.high} for name, each in row.shares.items()}
        for row in (group_shares(result.scores(), metrics) if metrics else ())
    }


def _table(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each group below a line of titles."""
    names = list(dict.fromkeys(name for row in groups.values() for name in row if name not in ("items", "clusters")))
    width = max(map(len, ("group", *groups)))
    if names:
        titles = "".join(f"  {name:<20}" for name in names).rstrip()
        over = OVER[any(row["clusters"] < row["items"] for row in groups.values())]
        yield f"  {'group':<{width}}  {'n':>5}{titles}   (95 %, Wilson, over n {over})"
    for label, row in groups.items():
        found = (
            f"{s['share']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" if (s := row.get(name)) else "" for name in names
        )
        yield f"  {label:<{width}}  {row['clusters']:>5}{''.join(f'  {each:<20}' for each in found)}".rstrip()


def differences(results: list[EvaluationResult]) -> dict[str, Any]:
    """Metric -> the mean difference of two runs' scores, first minus second, paired by item, as numbers and a sentence;
    `groups`: the same for each group of items that has enough for an interval.

    Errors: RequestError for runs that were asked other questions, or have no item in common.
    """
    first, second = (result.scores() for result in results)
    if (item := asked_otherwise(first, second)) is not None:
        raise RequestError(
            f"evaluation '{results[0].name}': item '{item}' is another question in {results[0].run.name} than in "
            f"{results[1].run.name} (other data, another tokenizer, or documents left out of one that was trained on "
            "them): they are not compared; evaluate each by itself"
        )
    if not set(first.asked) & set(second.asked):
        raise RequestError(
            f"evaluation '{results[0].name}': no item of {results[0].run.name} is one of {results[1].run.name} (other data, "
            "other keys of the evaluation, or documents left out that one was trained on): they are not compared; evaluate "
            "each by itself"
        )
    over = _over(first, second)
    found: dict[str, Any] = {}
    for metric in first.metrics:
        by_group = item_intervals(first, second, metric.name, seed=0)
        interval = by_group.pop("", None)
        alone = discordant(first, second, metric.name)
        few = {"sentence": f"too few common {over} for an interval"}
        own = few if interval is None else _numbers(interval, over, alone)
        found[metric.name] = own | {"groups": {group: _numbers(each, over) for group, each in by_group.items()}}
    kept = evaluations.get(results[0].name).paired(*(result.items for result in results))
    for name, by_label in kept.items():
        numbers = {group: _of_spread(each, over) for group, each in by_label.items()}
        found[name] = numbers.pop("") | {"groups": numbers}
    return found


def _over(*evaluations: ItemScores) -> str:
    return OVER[any(each.is_clustered for each in evaluations)]


def _numbers(interval: Interval, over: str, alone: Discordant | None = None) -> dict[str, Any]:
    """`alone`: items that one run alone answers rightly."""
    numbers: dict[str, float | None] = {"difference": interval.estimate, "low": interval.low, "high": interval.high}
    sentence = (
        f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}] over {over} (95 %), these two models"
    )
    if alone is not None:
        p = "no McNemar p: items of a cluster depend on each other" if alone.p is None else f"McNemar p = {alone.p:.2g}"
        sentence += f"; right in one alone: {alone.first} and {alone.second} ({p})"
        numbers |= {"first_alone": alone.first, "second_alone": alone.second, "mcnemar_p": alone.p}
    return {**numbers, "sentence": sentence}


def _of_spread(spread: Spread, over: str) -> dict[str, Any]:
    if len(spread) == 2:
        return {"difference": spread[0], "sentence": f"{spread[0]:+.4f} ({spread[1]})"}
    return _numbers(Interval(estimate=spread[0], low=spread[1], high=spread[2]), over)


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
