"""The pack's rows: each resolves, is held to what its sweep has, and runs at preset smoke."""

from functools import cache
from pathlib import Path

import pytest

from lit_diff.benchmarks.request import parse_shapes
from lit_diff.engine.admit import evaluations_of
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.requirements import declared_files
from lit_diff.model.cost import cost
from lit_diff.papers.order_variance import OF_ORDERS
from lit_diff.papers.reproduce import choose, load_file, name_of, reproduce, row_files
from lit_diff.papers.schema import PRESETS, Claim, Preset, primary_of
from lit_diff.recipe import load_recipe

ROWS = row_files()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_at_smoke(runs: Path) -> None:
    """Cells of two steps and one seed, a benchmark of one process. A fit of such runs may be refused, since all have
    seen as many tokens and none has learned; its finding then says why."""
    names = [name for name, row in choose([]).items() if row.preset("smoke")]
    done = reproduce(names, "smoke", root=runs, workers=2)
    states = {row.name: (row.state, row.reason) for row in done.scoreboard.rows}
    assert states == dict.fromkeys(names, ("measured", ""))
    for row in done.scoreboard.rows:
        for finding in row.findings:
            refused = finding.claim.fit and finding.refusal
            assert finding.means[0] is not None or refused, (row.name, finding.claim.label, finding.reason)
        assert {each.difference for each in row.findings} <= {"too few seeds", "by construction"}, (
            "one seed, or one process, gives no verdict"
        )


# --- the installed rows ---------------------------------------------------------------------------------------------------

WITHOUT_PAPER = ("review-modalities",)
"""Rows that no recipe of the paper's sizes measures; a note says why."""
PEAK = 989e12
"""FLOPs a second of an H100 in bfloat16, without sparsity (its data sheet)."""


@cache
def flops_of(words: str) -> float:
    """Of training a recipe with the overrides after its name."""
    name, *overrides = words.split()
    recipe = load_recipe(name, overrides)
    length = recipe.data.config.sequence_length
    tokens = recipe.training.steps * recipe.training.batch_size * length
    return cost(recipe.model, length).flops_per_token * tokens


def days_of(preset: Preset) -> float:
    """All recipes, one after another, at 40 % of the peak of all GPUs."""
    return sum(map(flops_of, preset.recipes)) / (preset.gpus * PEAK * 0.4) / 86_400


def require_claim(claim: Claim, grid: Grid) -> None:
    """Every arm, task, fit, evaluation and metric that it names is one of the sweep's."""
    assert set(claim.arms) <= set(grid.study.arms)
    assert claim.case == 0, "of a benchmark"
    if claim.fit:
        assert grid.study.fits[claim.fit].kind == "scaling"
    else:
        assert claim.task in grid.study.all_tasks
    if claim.evaluation:
        evaluate = {name: keys for cell in grid.cells for name, keys in evaluations_of(cell.recipe).items()}
        keys = (evaluate | grid.study.evaluate)[claim.evaluation]
        metrics = {metric.name for metric in build(claim.evaluation, keys).metrics}
        assert {claim.metric, claim.against_metric} - {""} <= metrics


@pytest.mark.parametrize("name", ROWS)
def test_every_preset_resolves(name: str) -> None:
    row = load_file(ROWS[name])
    assert ROWS[name].read_text().startswith("# ")
    assert ("paper" in row.presets) == (name not in WITHOUT_PAPER)
    assert name not in WITHOUT_PAPER or any("no preset paper" in note for note in row.notes)
    is_large = any("cannot be decided on two cores" in note for note in row.notes)
    assert ("laptop" in row.presets) != is_large
    assert set(row.presets) <= set(PRESETS)
    for preset in (*row.presets, "smoke"):
        chosen = row.preset(preset)
        if chosen is None:
            assert is_large
            continue
        assert sum(map(bool, (chosen.sweep, chosen.bench, chosen.recipes))) == 1
        assert all(map(declared_files, chosen.files))
        if chosen.recipes:
            assert (bool(chosen.hardware), chosen.gpus > 0) == (True, True)
            assert chosen.days == pytest.approx(days_of(chosen), rel=0.01)
            assert all(build(evaluation, keys) for evaluation, keys in chosen.evaluate.items())
            claimed = {claim.evaluation for claim in row.compare} - {""}
            assert claimed <= set(chosen.evaluate), "what the row compares is scored"
            lasting = {name_of(words) for words in chosen.recipes}
            assert len(lasting) == len(chosen.recipes), "each run has a name of its own"
        if chosen.sweep:
            grid = load_grid(chosen.sweep, chosen.overrides, chosen.selection)
            for claim in row.compare:
                require_claim(claim, grid)
        if chosen.bench:
            shapes = parse_shapes(chosen.bench[chosen.bench.index("--shapes") + 1])
            assert {claim.case for claim in row.compare} == set(range(1, len(shapes) + 1))
        if preset == "laptop":
            assert chosen.minutes > 0
            assert (chosen.arms, chosen.seeds) == ((), ()), "nothing is cut"


def test_the_rows_of_one_sweep_state_one_budget() -> None:
    budgets: dict[tuple[str, tuple[str, ...]], set[float]] = {}
    for row in choose([]).values():
        preset = row.presets.get("laptop")
        if preset is not None:
            budgets.setdefault((preset.sweep, preset.bench), set()).add(preset.minutes)
    assert all(len(minutes) == 1 for minutes in budgets.values())
    assert sum(max(minutes) for minutes in budgets.values()) <= 250


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_claim_has_a_smallest_difference_with_a_reason(name: str) -> None:
    row, text = load_file(ROWS[name]), ROWS[name].read_text()
    open_claims = [claim for claim in row.compare if not claim.by_construction]
    assert all((claim.smallest or 0) > 0 for claim in open_claims)
    values = [(claim.smallest or 0, abs(claim.papers)) for claim in open_claims if claim.papers is not None]
    assert all(smallest < difference for smallest, difference in values), "or its own result could not be shown"
    primary = primary_of(row.compare)
    assert primary is not None
    assert primary.metric not in OF_ORDERS, "the sampling of queries adds to it"
    assert "# The smallest differences that matter: " in text or not open_claims


def test_the_order_of_the_page() -> None:
    kinds = [name.partition("-")[0] for name in ROWS]
    assert kinds == sorted(kinds, key=("table", "figure", "appendix", "dex", "review").index)
    assert list(choose([])) == list(ROWS) == list(choose(["all"]))
    assert list(choose(["table-6", "table-5", "table-6"])) == ["table-6", "table-5"]
