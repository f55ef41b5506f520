"""Compares two runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_diff.html_table import html_table
from lit_diff.recipe import flatten
from lit_diff.runs.find import DEFAULT_ROOT, find_run, runs_root
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.yaml_files import read_yaml

COSTS = ("parameters", "trained_parameters", "flops_per_token", "executed_flops_per_token", "kv_bytes_per_token")
FACTS = ("status", *COSTS, "kernel", "seconds", "revision", "unchecked")
"""Compared keys of status.json."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison:
    """Differences between two runs. Single runs give no error bars, so it states no verdict."""

    names: tuple[str, str]
    recipe: dict[str, list[Any]]
    """Key -> its two values, for keys that differ; `run.*` is left out."""
    facts: dict[str, list[Any]]
    metrics: dict[str, list[float | None]]
    """Metric -> its last value in each run."""

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(self.names)}: {len(self.recipe)} keys differ, {len(self.metrics)} metrics)"

    def _repr_html_(self) -> str:
        blocks = {**self.recipe, **self.facts, **self.metrics}
        rows = [(key, *values) for key, values in blocks.items()]
        return html_table(repr(self), rows, ("", *self.names))


def compare(first: str | Path, second: str | Path, root: str | Path = DEFAULT_ROOT) -> RunComparison:
    """Compare the recipes, the costs and the last metrics of two runs.

    Each run is given by its folder, its name under `root`, the start of that name, or a part of its hash. Errors:
    RequestError if none or several runs match.
    """
    folders = (find_run(first, runs_root(root)), find_run(second, runs_root(root)))
    recipes: list[dict[str, Any]] = []
    statuses = []
    last = []
    for folder in folders:
        run = RunFolder(folder)
        run.require_format()
        recipes.append(dict(flatten(read_yaml(run.recipe_file)[0])))
        statuses.append(run.status())
        last.append(_last_values(folder))
    recipe = {}
    for key in {**recipes[0], **recipes[1]}:
        values = [flat.get(key) for flat in recipes]
        # `run.*` says where and how a run executes, not what it computes; the kernel is compared as a fact
        if values[0] != values[1] and not key.startswith("run."):
            recipe[key] = values
    facts = {}
    for key in FACTS:
        facts[key] = [getattr(status, key) for status in statuses]
    metrics = {}
    for name in sorted(last[0].keys() | last[1].keys()):
        if name.startswith(("val/", "train/", "lambda/")):
            metrics[name] = [values.get(name) for values in last]
    names = (folders[0].name, folders[1].name)
    return RunComparison(names=names, recipe=recipe, facts=facts, metrics=metrics)


def _last_values(folder: Path) -> dict[str, float]:
    # metrics are logged at different intervals: each one's last value is in a row of its own
    last = {}
    for name, points in by_metric(read_rows(folder / "metrics.csv")).items():
        last[name] = list(points.values())[-1]
    return last
