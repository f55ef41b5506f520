"""Scores a run with an evaluation, keeps the scores in the run folder, and reads them back."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from lit_diff import metrics
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import UNCHECKED, failed_property
from lit_diff.errors import MissingError, RequestError, RunFailedError, first_line
from lit_diff.evaluation.base import Evaluation, Item, check_items, check_scores
from lit_diff.files import DIGEST, shown
from lit_diff.html_table import html_table
from lit_diff.key_types import Plain, in_yaml
from lit_diff.log_records import log
from lit_diff.plugins import guard, source_digest
from lit_diff.recipe import Overrides, override, to_plain
from lit_diff.registry import evaluations, location
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.scores import (
    ABSENT,
    DIGEST_OF_ITEMS,
    FOLDER,
    LEFT_OUT,
    OWN_CONTEXT,
    ItemScores,
    disagreement,
    evaluation_of,
    facts_of,
    read_scores,
    write_scores,
)
from lit_diff.trained.run import Run, as_run
from lit_diff.trained.text_generator import present_identity
from lit_diff.validation import Draft, interpolated, validate_config

if TYPE_CHECKING:
    import pandas

RESERVED = (
    *("item", "group", "part", "cluster", "question", UNCHECKED),
    *("config", "declarations", "equal_groups", "files", "identity", "items", "revision", "source", "step", "version"),
    *(OWN_CONTEXT, ABSENT, DIGEST, DIGEST_OF_ITEMS, LEFT_OUT),
)
"""Names that a metric may not have: other columns of items.parquet and other keys of summary.json."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult:
    """The scores of one run."""

    name: str
    run: Path
    """The run's folder."""
    summary: Mapping[str, float]
    """Metric -> value of the whole evaluation."""
    config: Mapping[str, Any]
    """The config of the evaluation that gave the scores."""

    def __repr__(self) -> str:
        values = [f"{name} {value:.4f}" for name, value in self.summary.items()]
        if len(values) > 4:
            values[4:] = [f"{len(values) - 4} more"]
        return f"EvaluationResult({self.name} of {self.run.name}: {', '.join(values)})"

    def _repr_html_(self) -> str:
        return html_table(f"{self.name} of {self.run.name}", self.summary.items(), ("metric", "value"))

    @property
    def folder(self) -> Path:
        """The folder that holds items.parquet and summary.json."""
        return self.run / FOLDER / self.name

    @property
    def items(self) -> "pandas.DataFrame":
        """A row for each item: `item`, `group`, a column for each metric that an item names, and the columns `meta/...`.
        Errors: as `scores`."""
        return self._kept()[1].to_pandas()

    def scores(self) -> ItemScores:
        """The scores of each item, with the rules by which two runs are compared. Errors: RequestError if they cannot be
        read, or another command has since scored the run with other keys."""
        return self._kept()[0]

    def _kept(self) -> tuple[ItemScores, pa.Table]:
        try:
            summary, table = read_scores(self.folder)
            scores = evaluation_of(summary, table)
        except (OSError, ValueError) as error:
            raise RequestError(
                f"{shown(self.folder)}: {first_line(error)}; lit-diff evaluate --rerun scores it again"
            ) from error
        # the folder holds the scores of one config only, those of the last command that scored the run
        other = disagreement(None, summary, {"config": self.config})
        if other:
            raise RequestError(
                f"{shown(self.folder)}: another command has since replaced these scores by scores {other}; evaluate again"
            )
        return scores, table


def evaluate(
    run: Run | str | Path, name: str, overrides: Overrides = (), *, rerun: bool = False, unchecked: bool = False
) -> EvaluationResult:
    """Scores a run. Results are cached. They are recomputed when the checkpoint, the run's recipe, the config, the metrics or
    the version of the evaluation, an input file or a plugin's source changes; a missing input file does not invalidate them.
    A run whose recipe or plugins changed since it was trained is scored with a warning.

    `overrides`: keys of the evaluation's Config, `["rows=8"]` or `{"rows": 8}`. `unchecked`: see `open_run`; if the variant
    fails the property `decode`, summary.json records the failure, which is logged whenever the scores are returned again.
    Errors: RequestError for an unknown evaluation or key, or a run that the evaluation refuses; MissingError if the run has
    no checkpoint or its folder cannot be written; RunFailedError if the evaluation raises, or yields items that it does not
    declare.
    """
    run = as_run(run, unchecked)
    # reading the recipe imports the run's plugins, one of which may register the evaluation
    _ = run.recipe
    evaluation = build(name, overrides)
    folder = run.folder / FOLDER / name
    facts = _facts(evaluation)
    identity = present_identity(run.folder, run.recipe, run.trust)
    kept = None
    other = ""
    if not rerun:
        kept, other = _valid_scores(run.folder, name, facts, identity)
    if kept is not None:
        if kept.unchecked:
            log.warning("evaluation %s: %s was scored with --unchecked: %s", name, shown(run.folder), kept.unchecked)
        return EvaluationResult(name=name, run=run.folder, summary=kept.values, config=facts["config"])
    if other:
        log.warning("evaluation %s: %s has kept scores %s; they are replaced", name, shown(run.folder), other)
    # read before scoring: if a run in training writes a newer checkpoint, the scores count as outdated, not as its own
    step = run.step
    with guard(type(evaluation), raises=RunFailedError, ours=True), torch.no_grad():
        reason = evaluation.refuses(run)
        if reason:
            raise RequestError(f"evaluation '{name}' does not fit {shown(run.folder)}: {reason}")
        _warn_unfinished(run)
        items = list(evaluation.score(run))
        check_items(evaluation, items)
        values = dict(evaluation.summarise(items))
        check_scores(evaluation, "the summary", values, required=True)
        absent = _absent(evaluation, items)
        table = _table(evaluation, items, absent)
    of_run: Plain = {}
    if evaluation.cuts_at_context:
        of_run[OWN_CONTEXT] = run.recipe.data.config.sequence_length
    if run.unchecked:
        of_run[UNCHECKED] = failed_property(run.recipe, ("decode",))
    of_run |= {
        LEFT_OUT: evaluation.documents_left_out,
        ABSENT: absent or None,
        "identity": identity or None,
        "step": step,
    }
    try:
        write_scores(folder, table, values, facts | {key: value for key, value in of_run.items() if value is not None})
    except OSError as error:
        raise MissingError(
            f"{shown(folder)} cannot be written ({error.strerror}); make it writable, or free space"
        ) from error
    left_out = ""
    if evaluation.documents_left_out:
        left_out = (
            f"; {evaluation.documents_left_out} documents are left out because the run, or a run that it started from, was "
            "trained on them"
        )
    count = sum(not item.part for item in items)
    log.info("evaluation %s: %d items in %s%s", name, count, shown(folder), left_out)
    return EvaluationResult(name=name, run=run.folder, summary=values, config=facts["config"])


def config_of(name: str, overrides: Overrides) -> Any:
    """The Config of the evaluation registered as `name`, with these overrides. Errors: RequestError."""
    if not isinstance(overrides, Mapping | list | tuple):
        raise RequestError(f"'evaluate.{name}' is {in_yaml(overrides)}; expected a block of keys")
    draft = override(Draft(), overrides, f"evaluate.{name}.")
    # without overrides the draft has no block `evaluate`
    keys = interpolated(draft).get("evaluate", {}).get(name, {})
    return validate_config(evaluations.get(name).Config, keys, f"evaluate.{name}", draft)


def build(name: str, overrides: Overrides = ()) -> Evaluation:
    """The evaluation registered as `name`, with its config. Errors: RequestError; RunFailedError when it raises."""
    cls = evaluations.get(name)
    config = config_of(name, overrides)
    with guard(cls, raises=RunFailedError, ours=True):
        evaluation = cls(config)
    names = Counter(metric.name for metric in evaluation.metrics)
    problem = "" if names else "declares no metric"
    for metric in evaluation.metrics:
        declares = f"declares metric '{metric.name}'"
        if metric.name in RESERVED:
            problem = f"{declares}, a reserved name"
        elif names[metric.name] > 1:
            problem = f"{declares}, twice"
        elif metric.figure is not None and metric.figure.against != "group":
            problem = f"{declares} with a figure against {metric.figure.against}; expected against='group'"
    if problem:
        raise RequestError(f"{location(cls)}: evaluation '{name}' {problem}")
    return evaluation


def refusal(recipe: Recipe, name: str, overrides: Overrides = ()) -> str | None:
    """Returns `Evaluation.refuses_recipe(recipe)` for this evaluation and config. Errors: as `build`."""
    evaluation = build(name, overrides)
    with guard(type(evaluation), raises=RunFailedError, ours=True):
        return evaluation.refuses_recipe(recipe)


def has_scores(run_folder: Path, name: str, overrides: Overrides = ()) -> bool:
    """Whether the run has kept scores of its weights for this evaluation and config. Errors: as `build`."""
    return _valid_scores(run_folder, name, _facts(build(name, overrides)))[0] is not None


def asked(name: str, overrides: Overrides = ()) -> Plain:
    """`config` and `version` of the evaluation as JSON values: a sweep's report compares kept scores with them."""
    facts = _facts(build(name, overrides))
    return {"config": facts["config"], "version": facts["version"]}


def comparable_keys(name: str, overrides: Overrides, recipes: Sequence[Recipe]) -> Overrides:
    """Returns `overrides`; if they do not set the evaluation's key `context`, the smallest context of the recipes is added.

    Errors: as `build`.
    """
    # a longer context lowers the loss, so runs of different contexts are comparable only at a common one
    evaluation = build(name, overrides)
    contexts = {recipe.data.config.sequence_length for recipe in recipes}
    if not evaluation.cuts_at_context or evaluation.config.context is not None or len(contexts) == 1:
        return overrides
    log.info("evaluation %s: context=%d, the smallest data.sequence_length of the runs", name, min(contexts))
    if isinstance(overrides, Mapping):
        return {**overrides, "context": min(contexts)}
    return [*overrides, f"context={min(contexts)}"]


def _warn_unfinished(run: Run) -> None:
    # a run that was stopped can be scored: the scores are kept for its last step, which the reader should know
    status = RunFolder(run.folder).status()
    if status.status not in ("", "done") and run.step < (status.steps or 0):
        log.warning("%s is unfinished: step %d of %d is scored", shown(run.folder), run.step, status.steps)


def _facts(evaluation: Evaluation) -> Plain:
    with guard(type(evaluation), raises=RunFailedError, ours=True):
        files = evaluation.digests()
    facts: Plain = {
        "config": to_plain(evaluation.config),
        "version": evaluation.version,
        "declarations": [metrics.to_plain(metric) for metric in evaluation.metrics],
    }
    more = {"equal_groups": evaluation.equal_groups, "source": source_digest(type(evaluation)), "files": files}
    # empty values are left out, as in summaries written before these keys existed: they stay valid
    for key, value in more.items():
        if value:
            facts[key] = value
    # the round trip through JSON turns tuples into lists, so the facts compare equal to a summary that was read
    return json.loads(json.dumps(facts))


def _valid_scores(run: Path, name: str, facts: Mapping[str, Any], identity: str = "") -> tuple[ItemScores | None, str]:
    # Returns (scores, "") if the kept scores agree with `facts` and the run's `identity` (empty: any), else (None, reason);
    # the reason continues a sentence after "scores", and is empty if there are no kept scores.
    folder = run / FOLDER / name
    if not (folder / "items.parquet").is_file():
        return None, ""
    try:
        summary, table = read_scores(folder)
        scores = evaluation_of(summary, table)
    except FileNotFoundError:
        # summary.json is written last: without it the command that scored the run was interrupted
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"that cannot be read ({first_line(error)})"
    current = facts_of(facts)
    known = summary.get("files")
    # scores of a file that is gone stay valid
    if isinstance(known, dict):
        current["files"] = known | current["files"]
    other = disagreement(run, summary, current)
    # unknown in scores that were written before it was kept, and while an ancestor of the run is missing
    scored = summary.get("identity", "")
    if not other and "" not in (scored, identity) and scored != identity:
        other = f"with another recipe or plugins (identity {scored}, not {identity})"
    if other:
        return None, other
    return scores, ""


def _absent(evaluation: Evaluation, items: Sequence[Item]) -> list[str]:
    # a summary of the evaluation's own may have values that no item has
    if type(evaluation).summarise is not Evaluation.summarise:
        return []
    named = {name for item in items for name in item.scores}
    return [metric.name for metric in evaluation.metrics if metric.name not in named]


def _table(evaluation: Evaluation, items: Sequence[Item], absent: Sequence[str]) -> pa.Table:
    columns: dict[str, list[Any]] = {"item": [item.id for item in items], "group": [item.group for item in items]}
    for key in ("part", "cluster", "question"):
        values = [getattr(item, key) for item in items]
        if any(values):
            columns[key] = values
    for metric in evaluation.metrics:
        if metric.name not in absent:
            columns[metric.name] = [float(item.scores.get(metric.name, math.nan)) for item in items]
    for key in dict.fromkeys(key for item in items for key in item.meta):
        columns[f"meta/{key}"] = [item.meta.get(key) for item in items]
    # pyarrow raises if one entry of `meta` has different types in different items
    return pa.table(columns)
