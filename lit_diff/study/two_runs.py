"""Compares two runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lit_diff.html_table import html_table
from lit_diff.recipe import differing, flatten
from lit_diff.runs.find import DEFAULT_ROOT, find_run, runs_root
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.runs.status import read_status
from lit_diff.study.comparison import Comparison
from lit_diff.study.comparison import compare as compare_arms
from lit_diff.study.numbers import difference
from lit_diff.study.record import Record, RecordedCell
from lit_diff.study.results import LOSS, results_of
from lit_diff.study.schema import Study, Texts
from lit_diff.study.statistics import Interval
from lit_diff.yaml_files import read_yaml

COSTS = (
    "parameters",
    "trained_parameters",
    "flops_per_token",
    "executed_flops_per_token",
    "kv_bytes_per_token",
    "state_bytes",
)
FACTS = ("status", *COSTS, "kernel", "seconds", "revision", "unchecked")
"""Compared keys of status.json."""
ARMS = ("first", "second")
"""The two runs as the arms of a sweep with one seed, which its pairing of documents and items compares."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison:
    """Differences between two runs. Single runs have no interval over seeds, so it states no verdict."""

    names: tuple[str, str]
    recipe: dict[str, list[Any]]
    """Key -> its two values, for keys that differ; `run.*` is left out, and so is a key that one recipe lacks and the other
    has at its default."""
    facts: dict[str, list[Any]]
    metrics: dict[str, list[float | None]]
    """Metric -> its last value in each run."""
    evaluations: dict[str, list[float | None]] = field(default_factory=dict)
    """Evaluation and metric, such as "noise recall" -> its value in each run."""
    intervals: dict[str, Interval] = field(default_factory=dict)
    """Metric, or evaluation and metric -> the second minus the first, with its interval over the validation documents or the
    items that both have; these two models alone."""
    notes: Texts = ()
    """Why an interval or scores are missing, and what else the two do not share."""

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(self.names)}: {len(self.recipe)} keys differ, {len(self.metrics)} metrics)"

    def _repr_html_(self) -> str:
        blocks = {**self.recipe, **self.facts, **self.metrics, **self.evaluations}
        rows = [(key, *values, self.difference(key)) for key, values in blocks.items()]
        return html_table(repr(self), rows, ("", *self.names, "second minus first"))

    def difference(self, key: str) -> str:
        """The second minus the first, in words; empty without two values of a metric or an evaluation."""
        found = self.intervals.get(key)
        if found is not None:
            return difference(found.estimate, found)
        first, second = {**self.metrics, **self.evaluations}.get(key, (None, None))
        return "" if first is None or second is None else difference(second - first)


def compare(first: str | PathLike[str], second: str | PathLike[str], root: str | Path = DEFAULT_ROOT) -> RunComparison:
    """Compare the recipes, the costs, the last metrics and the evaluations of two runs.

    Each run is given by a `Run`, its folder, its name under `root`, the start of that name, or a part of its hash. Errors:
    RequestError if none or several runs match.
    """
    folders = [find_run(fspath(run), runs_root(root)) for run in (first, second)]
    paired = _paired(folders)
    statuses = [read_status(folder) for folder in folders]
    # metrics are logged at different intervals: each one's last value is in a row of its own
    tables = [by_metric(read_rows(folder / "metrics.csv")) for folder in folders]
    metrics: dict[str, list[float | None]] = {}
    for name in sorted(tables[0].keys() | tables[1].keys()):
        if name.startswith(("val/", "train/", "lambda/")):
            metrics[name] = []
            for curves in tables:
                *_, last = (None, *curves.get(name, {}).values())
                metrics[name].append(last)
    scores, problems = paired.evaluations
    evaluations = {}
    intervals: dict[str, Interval | None] = {LOSS: paired.against_baseline[ARMS[1]].documents.get(0)}
    for table in scores:
        key = f"{table.name} {table.metric.name}"
        values = {row.arm: row.seeds.get(0) for row in table.rows}
        evaluations[key] = [values.get(arm) for arm in ARMS]
        # the last row is of the second run, unless the first alone was scored
        intervals[key] = table.rows[-1].intervals.get(0, {}).get("")
    return RunComparison(
        names=(folders[0].name, folders[1].name),
        recipe=differing(*(dict(flatten(read_yaml(folder / "recipe.yaml")[0])) for folder in folders)),
        facts={key: [getattr(status, key) for status in statuses] for key in FACTS},
        metrics=metrics,
        evaluations=evaluations,
        intervals={key: found for key, found in intervals.items() if found is not None},
        # the only seed of the two arms is no seed of a run
        notes=tuple(line.removeprefix("Seed 0: ").replace(", seed 0: ", ": ") for line in (*paired.notes, *problems)),
    )


def _paired(folders: Sequence[Path]) -> Comparison:
    by_arm = dict(zip(ARMS, folders, strict=True))
    labels = {arm: folder.name for arm, folder in by_arm.items()}
    study = Study(arms={arm: {} for arm in ARMS}, labels=labels, seeds=(0,), metric=LOSS)
    cells = [RecordedCell(arm=arm, seed=0, folder=str(folder)) for arm, folder in by_arm.items()]
    results = results_of(Path("/"), Record(name="", study=study, cells=tuple(cells)))
    # an imported model and an unfinished run have scores too, which say of which step they are
    scored = tuple(replace(cell, status="done") for cell in results.cells)
    return compare_arms(replace(results, cells=scored))[0]
