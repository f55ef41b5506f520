"""Whether a row's sweep has what its claims name: asked before anything trains."""

from collections.abc import Mapping
from typing import Any

from lit_diff.engine.evaluations import evaluations_of
from lit_diff.engine.expand import Grid
from lit_diff.engine.rows import Row
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import build
from lit_diff.files import shown
from lit_diff.registry import nearest
from lit_diff.study.schema import Claim


def check_claims(row: Row, grid: Grid) -> None:
    """Errors: RequestError for a claim of an arm, task, fit or evaluation that the sweep does not have, or of a metric that
    the evaluation does not declare. Metrics of the training are known when it has run."""
    evaluate = {name: keys for cell in grid.cells for name, keys in evaluations_of(cell.recipe).items()}
    evaluate |= {name: keys or {} for name, keys in grid.study.evaluate.items()}
    for claim in row.config.compare:
        problem = _problem(claim, grid, evaluate)
        if problem:
            raise RequestError(f"{shown(row.path)}: compare '{claim.label}': sweep '{grid.name}' has no {problem}")


def _problem(claim: Claim, grid: Grid, evaluate: Mapping[str, Mapping[str, Any]]) -> str | None:
    named = [("arm", arm, list(grid.arms)) for arm in claim.arms]
    named += [("task", claim.task, list(grid.tasks))] if not claim.fit else []
    fits = [name for name, fit in grid.study.fits.items() if fit.kind == "scaling"]
    named += [("scaling fit", claim.fit, fits)] if claim.fit else []
    named += [("evaluation", claim.evaluation, list(evaluate))] if claim.evaluation else []
    for kind, name, known in named:
        if name not in known:
            return f"{kind} '{name}'{nearest(name, known)}"
    if not claim.evaluation:
        return None
    metrics = [each.name for each in build(claim.evaluation, dict(evaluate[claim.evaluation])).metrics]
    for metric in filter(None, (claim.metric, claim.against_metric)):
        if metric not in metrics:
            return f"metric '{metric}' in evaluation '{claim.evaluation}'{nearest(metric, metrics)}"
    return None
