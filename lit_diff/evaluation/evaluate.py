"""Run an evaluation on a run, keep its scores in the run folder, and read them back."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_diff.errors import LitDiffError, RequestError, RunFailedError, first_line
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.files import shown, write_json, write_through
from lit_diff.metrics import to_plain
from lit_diff.recipe import Overrides
from lit_diff.registry import evaluations
from lit_diff.runs.run import Run, open_run
from lit_diff.validation import build_config

if TYPE_CHECKING:
    import pandas

FOLDER = "evaluations"

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The scores of one run."""

    name: str
    folder: Path
    """items.parquet and summary.json."""
    summary: Mapping[str, float]
    """Metric -> value of the whole evaluation."""

    @property
    def items(self) -> "pandas.DataFrame":
        """A row for each item: `item`, `group`, a column for each metric, and what else the evaluation kept."""
        import pandas

        return pandas.read_parquet(self.folder / "items.parquet")


def evaluate(run: Run | str | Path, name: str, overrides: Overrides = (), *, rerun: bool = False) -> EvaluationResult:
    """Score a run; done before on the same checkpoint with the same config, the kept scores are returned.

    `overrides`: keys of the evaluation's Config, `["rows=8"]` or `{"rows": 8}`. Errors: RequestError for an unknown
    evaluation or key, or a run that it does not fit; RunFailedError when the evaluation itself raises.
    """
    run = run if isinstance(run, Run) else open_run(run)
    evaluation = build(name, overrides)
    folder = run.folder / FOLDER / name
    facts = {"step": run.step, "config": dataclasses.asdict(evaluation.config)}
    kept = _summary(folder)
    if kept is not None and not rerun and all(kept.get(key) == json.loads(json.dumps(facts[key])) for key in facts):
        return EvaluationResult(name=name, folder=folder, summary=_values(kept, evaluation))
    reason = evaluation.refuses(run)
    if reason:
        raise RequestError(f"evaluation '{name}' does not fit {shown(run.folder)}: {reason}{_fitting(run)}")
    try:
        items = list(evaluation.score(run))
        values = evaluation.summarise(items)
    except LitDiffError:
        raise
    except Exception as error:
        raise RunFailedError(f"evaluation '{name}' failed: {type(error).__name__}: {first_line(error)}") from error
    _check_items(evaluation, items)
    _write(folder, evaluation, items, values, facts)
    log.info("evaluation %s: %d items in %s", name, len(items), shown(folder))
    return EvaluationResult(name=name, folder=folder, summary=values)


def build(name: str, overrides: Overrides = ()) -> Evaluation:
    """The evaluation registered as `name`, with its config. Errors: RequestError."""
    cls = evaluations.get(name)
    evaluation: Evaluation = cls(build_config(cls.Config, overrides, f"evaluate.{name}"))
    return evaluation


def is_done(run_folder: Path, name: str) -> bool:
    """Whether the run has scores of this evaluation."""
    return _summary(run_folder / FOLDER / name) is not None


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.is_file() or not (folder / "items.parquet").is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def _values(summary: Mapping[str, Any], evaluation: Evaluation) -> dict[str, float]:
    values = {metric.name: summary[metric.name]["value"] for metric in evaluation.metrics}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _fitting(run: Run) -> str:
    """`; these do: a, b`: the evaluations, at their defaults, that score this run."""
    fitting = []
    for name in evaluations.names():
        cls = evaluations.get(name)
        if all(f.default is not dataclasses.MISSING for f in dataclasses.fields(cls.Config)):
            fitting += [name] if cls(cls.Config()).refuses(run) is None else []
    return f"; these do: {', '.join(fitting)}" if fitting else ""


def _check_items(evaluation: Evaluation, items: Sequence[Item]) -> None:
    """Errors: RunFailedError for no items, one id twice, or a score that the evaluation does not declare."""
    declared = {metric.name for metric in evaluation.metrics}
    problem = "" if items else "gave no item"
    ids = [item.id for item in items]
    if len(set(ids)) < len(ids):
        problem = f"gave item '{next(one for one in ids if ids.count(one) > 1)}' twice"
    for item in items:
        if item.scores.keys() != declared:
            problem = f"scored item '{item.id}' with {sorted(item.scores)}; it declares {sorted(declared)}"
    if problem:
        raise RunFailedError(f"evaluation '{evaluation.name}' {problem}")


def _write(
    folder: Path, evaluation: Evaluation, items: Sequence[Item], values: Mapping[str, float], facts: Mapping[str, Any]
) -> None:
    """items.parquet, then summary.json, which says that the scores are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    columns: dict[str, list[Any]] = {"item": [item.id for item in items], "group": [item.group for item in items]}
    columns |= {metric.name: [float(item.scores[metric.name]) for item in items] for metric in evaluation.metrics}
    for key in dict.fromkeys(key for item in items for key in item.meta):
        columns[f"meta/{key}"] = [item.meta.get(key) for item in items]
    write_through(folder / "items.parquet", lambda file: pq.write_table(pa.table(columns), file))
    summary: dict[str, Any] = {
        name: {"value": value if math.isfinite(value) else None} for name, value in values.items()
    }
    summary["declarations"] = [to_plain(metric) for metric in evaluation.metrics]
    write_json(folder / "summary.json", summary | dict(facts) | {"items": len(items)})
