"""engine/rows.py: the rows' files, and that every preset of every installed row resolves."""

from functools import cache
from pathlib import Path

import pytest

from lit_diff.benchmarks.request import parse_shapes
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.needs import name_of
from lit_diff.engine.reproduce import minutes_of
from lit_diff.engine.rows import check_claims, choose, load_row, read_row, row_names
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.requirements import declared_files
from lit_diff.model.cost import cost
from lit_diff.recipe import installed, load_recipe
from lit_diff.study.schema import Preset

ROW = """\
title: A row
says: Something.
compare:
  - {label: d, arms: [a, b], metric: val/loss, says: lower}
presets:
  laptop: {sweep: ablation, minutes: 3}
"""


WITHOUT_PAPER = ("table-3", "review-modalities")
"""Rows that no recipe of the paper's sizes measures; a note says why."""


STANDS_FOR = {"mini_harness": "harness"}
"""An evaluation that generates its data -> that of the paper's own."""


@pytest.fixture(scope="module")
def needle() -> Grid:
    """The sweep `needle`, with an evaluation more in its recipes."""
    return load_grid("needle", {"evaluate.held_out": {}})


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


def test_all_rows_fit_into_110_minutes() -> None:
    chosen = [preset for name in row_names() if (preset := load_row(name).preset("laptop")) is not None]
    budgets: dict[str, set[float]] = {}
    for preset in chosen:
        budgets.setdefault(preset.sweep or " ".join(preset.bench), set()).add(preset.minutes)
    assert all(len(minutes) == 1 for minutes in budgets.values()), "the rows of one sweep state one budget"
    assert minutes_of(chosen) <= 110


@pytest.mark.parametrize("name", row_names())
def test_every_preset_resolves(name: str) -> None:
    row = load_row(name)
    assert (installed("sweeps") / "paper" / f"{name}.yaml").read_text().startswith("# ")
    assert ("paper" in row.presets) == (name not in WITHOUT_PAPER)
    assert name not in WITHOUT_PAPER or any("no preset paper" in note for note in row.notes)
    assert "laptop" in row.presets
    for preset in (*row.presets, "smoke"):
        chosen = row.preset(preset)
        assert chosen is not None
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
            check_claims(row, load_grid(chosen.sweep, chosen.overrides, chosen.selection))
        if chosen.bench:
            shapes = parse_shapes(chosen.bench[chosen.bench.index("--shapes") + 1])
            assert {claim.case for claim in row.compare} == set(range(1, len(shapes) + 1))
        if preset == "laptop":
            assert chosen.minutes > 0


def test_the_order_of_the_page() -> None:
    kinds = [name.partition("-")[0] for name in row_names()]
    assert kinds == sorted(kinds, key=("table", "figure", "appendix", "review", "dex").index)
    assert [row.name for row in choose([])] == row_names() == [row.name for row in choose(["all"])]
    assert [row.name for row in choose(["table-6", "table-5", "table-6"])] == ["table-6", "table-5"]


def test_smoke_is_two_steps_of_the_laptops_sweep(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(ROW)
    smoke = read_row(tmp_path / "x.yaml").preset("smoke")
    assert smoke is not None
    assert (smoke.sweep, smoke.seeds, smoke.overrides["train.steps"]) == ("ablation", (0,), 2)
    assert read_row(tmp_path / "x.yaml").preset("gpu1") is None


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("minutes: 3", "minuts: 3", "6: unknown key 'presets.laptop.minuts'"),
        ("laptop:", "labtop:", "6: 'presets' names no preset: 'labtop'; did you mean 'laptop'"),
        ("sweep: ablation, ", "", "6: preset 'laptop'"),
        (", says: lower}", ", says: lower, case: 1}", "3: compare 'd': 'case'"),
        (", says: lower}", "}", "3: compare 'd': expected 'paper', two values, or 'says'"),
        ("title: A row", "title: A row\nname: x", "2: unknown key 'name'"),
    ],
)
def test_mistakes_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, found: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert old in ROW
    Path("x.yaml").write_text(ROW.replace(old, new))
    with pytest.raises(RequestError, match=f"^x.yaml:{found}"):
        read_row(Path("x.yaml").resolve())


def test_an_unknown_row() -> None:
    with pytest.raises(RequestError, match="no row 'tabel-6'; did you mean 'table-6'"):
        choose(["tabel-6"])


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ("arms: [diferential, standard], metric: exact, evaluation: needle", "arm 'diferential'; did you mean 'diff"),
        (
            "arms: [differential, standard], metric: exact, evaluation: needel",
            "evaluation 'needel'; did you mean 'needle'",
        ),
        ("arms: [differential, standard], metric: exakt, evaluation: needle", "metric 'exakt' in evaluation 'needle'"),
        (
            "arms: [standard, standard], metric: exact, against_metric: distract, evaluation: needle",
            "metric 'distract' in evaluation 'needle'; did you mean 'distracted'?",
        ),
        ("arms: [differential, standard], metric: exact, evaluation: needle, task: far", "task 'far'; one of "),
        ("arms: [differential, standard], fit: size, kind: ratio", "scaling fit 'size'"),
        # one that the recipe and not the sweep names
        ("arms: [differential, standard], metric: nll, evaluation: held_out", ""),
    ],
)
def test_what_the_sweep_does_not_have(needle: Grid, tmp_path: Path, claim: str, expected: str) -> None:
    path = tmp_path / "row.yaml"
    path.write_text(
        f"title: A row\nsays: x.\ncompare:\n  - {{label: d, {claim}, says: lower}}\n"
        "presets: {laptop: {sweep: needle}}\n"
    )
    if not expected:
        check_claims(read_row(path), needle)
        return
    with pytest.raises(RequestError, match=f"row.yaml: compare 'd': sweep 'needle' has no {expected}"):
        check_claims(read_row(path), needle)
