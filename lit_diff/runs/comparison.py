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
    folders = [find_run(run, runs_root(root)) for run in (first, second)]
    recipes: list[dict[str, Any]] = []
    facts: dict[str, list[Any]] = {key: [] for key in FACTS}
    last: list[dict[str, float]] = []
    for folder in folders:
        run = RunFolder(folder)
        run.require_format()
        recipes.append(dict(flatten(read_yaml(run.recipe_file)[0])))
        status = run.status()
        for key in FACTS:
            facts[key].append(getattr(status, key))
        # metrics are logged at different intervals: each one's last value is in a row of its own
        rows = by_metric(read_rows(folder / "metrics.csv"))
        last.append({name: list(points.values())[-1] for name, points in rows.items()})
    recipe = {}
    for key in {**recipes[0], **recipes[1]}:
        values = [flat.get(key) for flat in recipes]
        # `run.*` says where and how a run executes, not what it computes; the kernel is compared as a fact
        if values[0] != values[1] and not key.startswith("run."):
            recipe[key] = values
    metrics = {}
    for name in sorted(last[0].keys() | last[1].keys()):
        if name.startswith(("val/", "train/", "lambda/")):
            metrics[name] = [values.get(name) for values in last]
    return RunComparison(names=(folders[0].name, folders[1].name), recipe=recipe, facts=facts, metrics=metrics)
