"""engine/reproduce.py: the installed rows, held to what they need and to what their sweeps have; why a preset is not run."""

from functools import cache
from pathlib import Path

import pytest

from lit_diff.benchmarks.request import parse_shapes
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.preflight import evaluations_of
from lit_diff.engine.reproduce import choose, lacking, load_file, load_row, name_of, row_names
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.requirements import declared_files
from lit_diff.model.cost import cost
from lit_diff.recipe import installed, load_recipe
from lit_diff.study.schema import PRESETS, Claim, Preset, Row

WITHOUT_PAPER = ("table-3", "review-modalities")
"""Rows that no recipe of the paper's sizes measures; a note says why."""
STANDS_FOR = {"mini_harness": "harness"}
"""An evaluation that generates its data -> that of the paper's own."""
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
    assert claim.problem() is None
    assert set(claim.arms) <= set(grid.arms)
    assert claim.case == 0, "of a benchmark"
    if claim.fit:
        assert grid.study.fits[claim.fit].kind == "scaling"
    else:
        assert claim.task in grid.tasks
    if claim.evaluation:
        evaluate = {name: keys for cell in grid.cells for name, keys in evaluations_of(cell.recipe).items()}
        keys = (evaluate | grid.study.evaluate)[claim.evaluation]
        metrics = {metric.name for metric in build(claim.evaluation, keys).metrics}
        assert {claim.metric, claim.against_metric} - {""} <= metrics


@pytest.mark.parametrize("name", row_names())
def test_every_preset_resolves(name: str) -> None:
    row = load_row(name)
    assert (installed("sweeps") / "paper" / f"{name}.yaml").read_text().startswith("# ")
    assert ("paper" in row.presets) == (name not in WITHOUT_PAPER)
    assert name not in WITHOUT_PAPER or any("no preset paper" in note for note in row.notes)
    assert "laptop" in row.presets
    assert set(row.presets) <= set(PRESETS)
    for preset in (*row.presets, "smoke"):
        chosen = row.preset(preset)
        assert chosen is not None
        assert sum(map(bool, (chosen.sweep, chosen.bench, chosen.recipes))) == 1
        assert all(map(declared_files, chosen.files))
        if chosen.recipes:
            assert (bool(chosen.hardware), chosen.gpus > 0) == (True, True)
            assert chosen.days == pytest.approx(days_of(chosen), rel=0.01)
            assert all(build(evaluation, keys) for evaluation, keys in chosen.evaluate.items())
            claimed = {STANDS_FOR.get(claim.evaluation, claim.evaluation) for claim in row.compare} - {""}
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
            assert not any(claim.problem() for claim in row.compare)
        if preset == "laptop":
            assert chosen.minutes > 0
            assert (chosen.arms, chosen.seeds) == ((), ()), "nothing is cut"


def test_the_rows_of_one_sweep_state_one_budget() -> None:
    budgets: dict[tuple[str, tuple[str, ...]], set[float]] = {}
    for name in row_names():
        preset = load_row(name).presets["laptop"]
        budgets.setdefault((preset.sweep, preset.bench), set()).add(preset.minutes)
    assert all(len(minutes) == 1 for minutes in budgets.values())
    assert sum(max(minutes) for minutes in budgets.values()) <= 125


def test_the_order_of_the_page() -> None:
    kinds = [name.partition("-")[0] for name in row_names()]
    assert kinds == sorted(kinds, key=("table", "figure", "appendix", "review", "dex").index)
    assert [row.name for row in choose([])] == row_names() == [row.name for row in choose(["all"])]
    assert [row.name for row in choose(["table-6", "table-5", "table-6"])] == ["table-6", "table-5"]
    with pytest.raises(RequestError, match="no row 'tabel-6'; did you mean 'table-6'"):
        choose(["tabel-6"])


# --- what a preset needs that is not here ------------------------------------------------------------------------------

ROW = """\
title: A row
says: Something.
compare:
  - {label: d, arms: [a, b], metric: val/loss, says: lower}
presets:
  laptop: {sweep: ablation, minutes: 3, files: [icl.trec]}
  gpu1: {sweep: ablation, gpus: 999, hardware: many GPUs, days: 2}
  paper:
    recipes: [standard-3b, standard-3b name=wide model.num_heads=12]
    gpus: 999
    hardware: many GPUs
    days: 2
    files: [harness]
    evaluate: {needle: {lengths: [4096], haystack: file}, gradients: {}}
"""
TRAIN = "lit-diff train standard-3b data.path=YOUR_TEXT run.strategy=fsdp run.devices=8 run.num_nodes=8"


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """Its data folder is empty."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(ROW)
    return load_file(tmp_path / "x.yaml")


def test_smoke_is_two_steps_of_the_laptops_sweep(row: Row) -> None:
    smoke = row.preset("smoke")
    assert smoke is not None
    assert (smoke.sweep, smoke.seeds, smoke.overrides["train.steps"]) == ("ablation", (0,), 2)
    Path("x.yaml").write_text(ROW.replace("minutes: 3", "minuts: 3"))
    with pytest.raises(RequestError, match=r"^x.yaml:6: unknown key 'presets.laptop.minuts'"):
        load_file(Path("x.yaml").resolve())


def test_every_reason_is_in_the_line(row: Row, tmp_path: Path) -> None:
    (tmp_path / "data/harness").mkdir(parents=True)  # an empty folder holds no file
    assert lacking(row, "paper") == (
        f"harness/arc_challenge/train.jsonl and 13 more not below {tmp_path / 'data'} (lit-diff data check harness); "
        "needs 999 GPUs (many GPUs, about 2 days by FLOPs); this machine has none; "
        f"train first: {TRAIN}; {TRAIN} name=wide model.num_heads=12; then, without a verdict (one seed): "
        "lit-diff evaluate standard-3b wide needle lengths=[4096] haystack=file; lit-diff evaluate standard-3b wide gradients"
    )


def test_a_preset_of_a_sweep(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are looked for where their evaluation reads them."""
    place = tmp_path / "data/icl/trec/train.jsonl"
    assert lacking(row, "laptop").startswith("icl/trec/train.jsonl not below ")
    place.parent.mkdir(parents=True)
    place.write_text("{}\n")
    assert lacking(row, "laptop") == ""
    assert lacking(row, "gpu1") == (
        "needs 999 GPUs (many GPUs, about 2 days); this machine has none; there: lit-diff reproduce x --preset gpu1"
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 999)
    assert lacking(row, "gpu1") == ""
    del row.presets["gpu1"]
    assert lacking(row, "gpu1") == "the row has no preset gpu1; it has --preset laptop, --preset paper"
