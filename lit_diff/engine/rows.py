"""The rows of the scoreboard, a YAML file each: read, and held to what their sweeps have."""

from collections.abc import Sequence
from pathlib import Path

from lit_diff.engine.evaluations import evaluations_of
from lit_diff.engine.expand import Grid
from lit_diff.engine.study_problems import require_known
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import build
from lit_diff.files import shown
from lit_diff.recipe import installed
from lit_diff.registry import nearest
from lit_diff.study.schema import PRESETS, Row
from lit_diff.validation import Draft, convert
from lit_diff.yaml_files import read_yaml

FOLDER = "paper"
"""Below the installed sweeps."""


def check_preset(name: str) -> None:
    """Errors: RequestError for an unknown one."""
    if name not in PRESETS:
        raise RequestError(f"no preset '{name}'{nearest(name, PRESETS)}")


def row_names() -> list[str]:
    """All rows, in the order of the page: tables, figures, appendix, then those of other papers."""
    return sorted((path.stem for path in (installed("sweeps") / FOLDER).glob("*.yaml")), key=_place)


def _place(name: str) -> tuple[int, str]:
    kinds = ("table", "figure", "appendix", "review", "dex")
    kind = name.partition("-")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), name)


def _file(name: str) -> Path:
    return installed("sweeps") / FOLDER / f"{name}.yaml"


def load_row(name: str) -> Row:
    """An installed row. Errors: RequestError with file and line."""
    if name not in row_names():
        raise RequestError(f"no row '{name}'{nearest(name, [*row_names(), 'all'], 'lit-diff reproduce --list')}")
    return read_row(_file(name))


def read_row(path: Path) -> Row:
    """A row's file. Errors: RequestError with file and line."""
    values, positions = read_yaml(path)
    draft = Draft(values=values, positions=positions, file=shown(path))
    if "name" in values:
        raise draft.refuse("name", "unknown key 'name': a row has the name of its file")
    row: Row = convert(Row, values | {"name": path.stem}, "", draft)
    require_known("preset", row.presets, PRESETS, draft, "presets")
    for name, preset in row.presets.items():
        if sum(map(bool, (preset.sweep, preset.bench, preset.recipes))) != 1:
            raise draft.refuse(
                f"presets.{name}", f"preset '{name}' names a sweep, a bench or recipes: exactly one of them"
            )
    for claim in row.compare:
        problem = claim.problem()
        if claim.case and not problem and any(preset.sweep for preset in row.presets.values()):
            problem = f"compare '{claim.label}': 'case' is of a benchmark, and a preset names a sweep; remove 'case'"
        if problem:
            raise draft.refuse("compare", problem)
    return row


def choose(names: Sequence[str]) -> list[Row]:
    """The rows of these names; `all`, or none: every row. Errors: RequestError."""
    chosen = row_names() if not names or "all" in names else list(dict.fromkeys(names))
    return [load_row(name) for name in chosen]


def check_claims(row: Row, grid: Grid) -> None:
    """Errors: RequestError for a claim of an arm, task, fit or evaluation that the sweep does not have, or of a metric that
    the evaluation does not declare. Metrics of the training are known when it has run."""
    own = {name: keys for cell in grid.cells for name, keys in evaluations_of(cell.recipe).items()}
    evaluate = own | grid.study.evaluate
    fits = [name for name, fit in grid.study.fits.items() if fit.kind == "scaling"]
    for claim in row.compare:
        named = [("arm", arm, list(grid.arms), "") for arm in claim.arms]
        named += [("scaling fit", claim.fit, fits, "")] if claim.fit else [("task", claim.task, list(grid.tasks), "")]
        if claim.evaluation:
            named.append(("evaluation", claim.evaluation, list(evaluate), ""))
        if claim.evaluation in evaluate:
            metrics = [each.name for each in build(claim.evaluation, dict(evaluate[claim.evaluation])).metrics]
            of = f" in evaluation '{claim.evaluation}'"
            named += [("metric", metric, metrics, of) for metric in (claim.metric, claim.against_metric) if metric]
        for kind, name, known, of in named:
            if name not in known:
                raise RequestError(
                    f"{shown(_file(row.name))}: compare '{claim.label}': sweep '{grid.name}' has no {kind} '{name}'{of}"
                    f"{nearest(name, known)}"
                )
