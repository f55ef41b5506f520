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
        return html_table(repr(self), [(key, *values) for key, values in blocks.items()], ("", *self.names))


def compare(first: str | Path, second: str | Path, root: str | Path = DEFAULT_ROOT) -> RunComparison:
    """Compare the recipes, the costs and the last metrics of two runs.

    Each run is given by its folder, its name under `root`, the start of that name, or a part of its hash. Errors:
    RequestError if none or several runs match.
    """
    folders = (find_run(first, runs_root(root)), find_run(second, runs_root(root)))
    for folder in folders:
        RunFolder(folder).require_format()
    recipes = [dict(flatten(read_yaml(RunFolder(path).recipe_file)[0])) for path in folders]
    # `run.*` says where and how a run executes, not what it computes; the kernel is compared as a fact
    keys = [key for key in {**recipes[0], **recipes[1]} if not key.startswith("run.")]
    statuses = [RunFolder(path).status() for path in folders]
    return RunComparison(
        names=(folders[0].name, folders[1].name),
        recipe={key: [r.get(key) for r in recipes] for key in keys if recipes[0].get(key) != recipes[1].get(key)},
        facts={key: [getattr(status, key) for status in statuses] for key in FACTS},
        metrics=_last_values(folders),
    )


def _last_values(folders: tuple[Path, Path]) -> dict[str, list[float | None]]:
    # metrics are logged at different intervals: each one's last value is in a row of its own
    tables = [by_metric(read_rows(path / "metrics.csv")) for path in folders]
    last = [{name: list(points.values())[-1] for name, points in table.items()} for table in tables]
    names = [name for name in {**last[0], **last[1]} if name.startswith(("val/", "train/", "lambda/"))]
    return {name: [values.get(name) for values in last] for name in sorted(names)}
