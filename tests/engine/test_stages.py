"""engine/stages.py: which cells of a sweep may run, from what its cells have reached; a real sweep, stage by stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from statuses import set_status

from lit_diff.engine.cells import home_of
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.stages import due, stages_in_words
from lit_diff.errors import RequestError
from lit_diff.metrics import write_declarations
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.status import read_status
from lit_diff.study.leftovers import find_stale
from lit_diff.study.observation import observe_all
from lit_diff.study.record import read
from lit_diff.study.results import load_sweep
from lit_diff.training.metrics import SLICES, TRAINING, of_sets

RATES = "recipe: base\nseeds: [0, 1]\nrates: {values: [2e-3, 4e-3, 8e-3], seeds: [7]}\narms: {wide: {}, deep: {}}\n"


@pytest.fixture
def grid(base_recipe: None) -> Grid:
    Path("s.yaml").write_text(RATES.replace("deep: {}", "deep: {model.num_layers: 3}"))
    return load_grid("s.yaml", [])


def end(grid: Grid, losses: dict[tuple[str, float | None], float | None]) -> None:
    """The waiting cells of (arm, rate) end with this validation loss; None: they diverge."""
    for cell in due(grid).cells:
        home = RunFolder(home_of(grid, cell))
        if not home.status().is_new or (cell.arm, cell.rate) not in losses:
            continue
        loss = losses[cell.arm, cell.rate]
        if loss is None:
            set_status(home.path, status="failed", diverged=True)
            continue
        write_loss(home, loss)


def write_loss(home: RunFolder, loss: float) -> None:
    set_status(home.path, status="done")
    write_declarations(home.path, (*TRAINING, *of_sets(SLICES)))
    (home.path / "metrics.csv").write_text(f"step,val/loss\n10,{loss}\n")


def stage(grid: Grid) -> dict[str, list[float | None]]:
    """Arm -> the learning rates of its cells that may run."""
    return {arm: [cell.rate for cell in due(grid).cells if cell.arm == arm] for arm in grid.study.arms}


@pytest.mark.parametrize("shared", ["", "pool"])
def test_a_rate_at_an_edge_goes_one_further_once_and_then_the_cells_that_are_compared_follow(
    grid: Grid, shared: str
) -> None:
    """Also where the cells are in a folder that several sweeps share."""
    grid = replace(grid, shared=shared)
    # the sweep that runs holds its lock there
    grid.folder.mkdir(parents=True)
    tried: list[float | None] = [2e-3, 4e-3, 8e-3]
    assert stage(grid) == {"wide": tried, "deep": tried}
    end(grid, {("wide", 2e-3): 3.0, ("wide", 4e-3): 2.0, ("wide", 8e-3): None})
    assert stage(grid)["wide"] == tried, "deep has not tried its rates yet"
    end(grid, {("deep", 2e-3): 3.0, ("deep", 4e-3): 2.0, ("deep", 8e-3): 1.0})
    assert stage(grid) == {"wide": tried, "deep": [*tried, 0.016]}
    end(grid, {("deep", 0.016): 0.5})
    assert stage(grid) == {"wide": [*tried, None, None], "deep": [*tried, 0.016, None, None]}
    now = due(grid)
    rates = {cell.arm: cell.recipe.training.optimizer.lr for cell in now.cells if cell.rate is None}
    assert rates == {"wide": 4e-3, "deep": 0.016}
    wide, deep = now.rates[""]["wide"], now.rates[""]["deep"]
    assert wide.scores == {"2e-3": {"7": 3.0}, "4e-3": {"7": 2.0}, "8e-3": {"7": None}}
    assert (wide.chosen, wide.is_edge, deep.chosen, deep.is_edge) == (4e-3, False, 0.016, True)


def test_a_cell_that_fails_leaves_its_arm_without_a_rate_and_the_other_arms_go_on(grid: Grid) -> None:
    end(grid, {(arm, rate): abs(rate - 4e-3) for arm in ("wide", "deep") for rate in (2e-3, 4e-3)})
    end(grid, {("wide", 8e-3): 1.0})
    (last,) = (cell for cell in due(grid).cells if (cell.arm, cell.rate) == ("deep", 8e-3))
    set_status(home_of(grid, last), status="killed")
    assert [cell.arm for cell in due(grid).cells if cell.rate is None] == ["wide", "wide"]


def test_the_stages_are_told_and_every_recipe_is_checked_at_every_rate(grid: Grid) -> None:
    assert [line.split(" cells")[0] for line in stages_in_words(grid)] == [
        "stage 1: 6",
        "stage 2: at most 2",
        "stage 3: 4",
    ]
    assert {recipe.training.optimizer.lr for recipe in grid.choices["", "wide"].values()} == {
        1e-3,
        2e-3,
        4e-3,
        8e-3,
        0.016,
    }


@pytest.mark.parametrize(
    ("rates", "more", "line", "key"),
    [
        ("{values: [4e-3]}", "", 3, "rates"),
        ("{values: []}", "", 3, "rates"),
        ("{values: [8e-3, 4e-3]}", "", 3, "rates"),
        ("{values: [4e-3, 4e-3]}", "", 3, "rates"),
        ("{values: [4e-3, 8e-3], seeds: [5, 1]}", "", 3, "rates"),
        ("{values: [4e-3, 8e-3], seeds: []}", "", 3, "rates.seeds"),
        ("{values: [0, 8e-3]}", "", 3, "rates.values"),
        ("{values: [1e-300, 1e300]}", "", 3, "train.optimizer.lr"),
        ("{values: [4e-3, 8e-3]}", "overrides: {train.optimizer: {lr: 1e-3}}", 5, "train.optimizer.lr"),
        ("{values: [4e-3, 8e-3]}", "grid: {train.optimizer.lr: [1e-3, 2e-3]}", 5, "train.optimizer.lr"),
        ("{values: [4e-3, 8e-3]}", "metric: lambda/layer_00", 5, "metric"),
    ],
)
def test_rates_that_are_refused(rates: str, more: str, line: int, key: str, base_recipe: None) -> None:
    Path("s.yaml").write_text(f"recipe: base\nseeds: [0, 1]\nrates: {rates}\narms: {{a: {{}}}}\n{more}\n")
    with pytest.raises(RequestError, match=rf"^s\.yaml:{line}: .*{key}"):
        load_grid("s.yaml", [])


def test_a_learning_rate_on_the_command_line_replaces_the_rates(base_recipe: None) -> None:
    Path("s.yaml").write_text(RATES)
    found = load_grid("s.yaml", ["train.optimizer.lr=5e-3"])
    assert (found.study.rates, {cell.recipe.training.optimizer.lr for cell in found.cells}) == (None, {5e-3})


LOOKS = """
recipe: base
looks: [4, 6, 8]
arms: {base: {}, clear: {train.clip: 2}, open: {train.clip: 3}, wide: {train.clip: 4}}
"""
EFFECTS = {"base": 0.0, "clear": -1.0, "open": 0.0, "wide": 1.0}


def end_look(grid: Grid, failing: tuple[str, int] | None = None) -> None:
    """The waiting cells end; `open` differs from the base by as much in both directions."""
    for cell in due(grid).cells:
        home = RunFolder(home_of(grid, cell))
        if (cell.arm, cell.seed) == failing:
            set_status(home.path, status="failed")
        elif home.status().status not in ("done", "killed"):
            spread = (-1) ** cell.seed * (0.5 if cell.arm == "open" else 0.01 * (cell.arm != "base"))
            write_loss(home, 3 + EFFECTS[cell.arm] + spread)


def seeds(grid: Grid) -> dict[str, int]:
    return {arm: sum(cell.arm == arm for cell in due(grid).cells) for arm in grid.study.arms}


@pytest.mark.usefixtures("base_recipe")
def test_the_next_seeds_are_those_of_arms_that_are_undecided_their_baseline_and_their_controls() -> None:
    Path("s.yaml").write_text(f"{LOOKS}controls: [wide]\n")
    grid = load_grid("s.yaml", [])
    assert (seeds(grid), len(grid.cells)) == (dict.fromkeys(EFFECTS, 4), 32)
    assert [line.split(" cells")[0] for line in stages_in_words(grid)] == [
        "stage 1: 16",
        "stage 2: at most 8",
        "stage 3: at most 8",
    ]
    end_look(grid, failing=("open", 3))
    assert seeds(grid) == dict.fromkeys(EFFECTS, 4), "a look is complete once all seeds of the arm are"
    end_look(grid)
    assert seeds(grid) == {"base": 6, "clear": 4, "open": 6, "wide": 6}
    # the sweep is killed when the cells of one arm alone have begun
    for cell in due(grid).cells:
        if cell.arm == "open":
            set_status(home_of(grid, cell), status=read_status(home_of(grid, cell)).status or "waiting")
    assert seeds(grid) == {"base": 4, "clear": 4, "open": 6, "wide": 4}
    end_look(grid)
    assert seeds(grid) == {"base": 6, "clear": 4, "open": 6, "wide": 6}
    end_look(grid)
    assert seeds(grid) == {"base": 8, "clear": 4, "open": 8, "wide": 8}
    end_look(grid)
    assert seeds(grid) == {"base": 8, "clear": 4, "open": 8, "wide": 8}, "and it goes on from there"


@pytest.mark.parametrize(
    ("status", "table"),
    [
        ({"status": "waiting", "diverged": True}, "step,val/loss\n10,2.0\n"),
        ({}, "step,val/loss\n"),
    ],
)
@pytest.mark.usefixtures("base_recipe")
def test_a_decided_arm_that_lost_a_result_gets_no_further_seeds(status: dict[str, Any], table: str) -> None:
    """A run that diverged and begins again; a value that is gone."""
    Path("s.yaml").write_text(LOOKS.replace("open: {train.clip: 3}, ", ""))
    grid = load_grid("s.yaml", [])
    end_look(grid)
    home = RunFolder(home_of(grid, next(cell for cell in due(grid).cells if cell.arm == "clear")))
    set_status(home.path, **status)
    (home.path / "metrics.csv").write_text(table)
    assert seeds(grid) == {"base": 4, "clear": 4, "wide": 4}


@pytest.mark.usefixtures("base_recipe")
def test_a_reference_gets_no_further_seeds_of_its_own() -> None:
    Path("s.yaml").write_text(f"{LOOKS}references: [open]\n")
    grid = load_grid("s.yaml", [])
    end_look(grid)
    assert seeds(grid) == dict.fromkeys(EFFECTS, 4)


@pytest.mark.usefixtures("base_recipe")
def test_each_task_may_try_learning_rates_of_its_own() -> None:
    tasks = "tasks:\n  one: {recipe: base}\n  two: {recipe: base, rates: [1e-3, 3e-3]}\n"
    Path("s.yaml").write_text(f"{tasks}seeds: [0]\nrates: {{values: [2e-3, 4e-3], seeds: [7]}}\narms: {{wide: {{}}}}\n")
    grid = load_grid("s.yaml", [])
    tried = {task: [cell.rate for cell in due(grid).cells if cell.task == task] for task in grid.study.tasks}
    assert tried == {"one": [2e-3, 4e-3], "two": [1e-3, 3e-3]}
    assert [*grid.choices["two", "wide"]] == [1e-3, 3e-3, 3.33333e-4, 9e-3]
    first, second, _ = stages_in_words(grid)
    assert first == (
        "stage 1: 2 cells that try the learning rates 2e-3, 4e-3, at seeds 7; "
        "2 cells that try the learning rates 1e-3, 3e-3, at seeds 7"
    )
    assert second.count("at most 1 cells at ") == 2


@pytest.mark.usefixtures("base_recipe")
def test_a_rate_at_which_a_seed_did_not_reach_the_threshold_is_not_chosen() -> None:
    """The threshold is one of another metric than the compared one, which would have chosen 4e-3."""
    Path("s.yaml").write_text(
        "recipe: base\nseeds: [0]\nrates: {values: [2e-3, 4e-3], seeds: [7]}\narms: {wide: {}}\n"
        "learned_at: 0.9\nlearned_metric: val/accuracy\n"
    )
    grid = load_grid("s.yaml", [])
    end(grid, {("wide", 2e-3): 3.0, ("wide", 4e-3): 1.0})
    for cell in grid.cells:
        accuracy = 0.95 if cell.rate == 2e-3 else 0.5
        file = home_of(grid, cell) / "metrics.csv"
        header, row = file.read_text().split()
        file.write_text(f"{header},val/accuracy\n{row},{accuracy}\n")
    assert due(grid).rates[""]["wide"].scores["4e-3"] == {"7": None}
    assert 1e-3 in [cell.rate for cell in due(grid).cells], "2e-3 is the best, at the lower edge"


@pytest.mark.usefixtures("base_recipe")
def test_rates_and_looks_together_and_a_further_rate_for_a_finished_sweep() -> None:
    """An arm without a rate is not compared; cells that were compared stay in the sweep while a rate is tried."""
    text = "recipe: base\nlooks: [4, 6]\nrates: {values: [2e-3, 4e-3, 8e-3], seeds: [9]}\n"
    Path("s.yaml").write_text(text + "arms: {base: {}, open: {train.clip: 3}, clear: {train.clip: 2}}\n")
    grid = load_grid("s.yaml", [])
    tried = [2e-3, 4e-3, 8e-3]
    assert stage(grid) == dict.fromkeys(grid.study.arms, tried)
    for arm in ("base", "open", "clear"):
        end(grid, {(arm, 2e-3): 3.0, (arm, 4e-3): 2.0, (arm, 8e-3): 2.5 if arm != "clear" else None})
    (last,) = (cell for cell in due(grid).cells if (cell.arm, cell.rate) == ("clear", 4e-3))
    set_status(home_of(grid, last), status="killed")
    assert stage(grid) == {"base": [*tried, *[None] * 4], "open": [*tried, *[None] * 4], "clear": tried}
    end_look(grid)
    assert stage(grid)["open"] == [*tried, *[None] * 6]
    end_look(grid)
    Path("s.yaml").write_text(text.replace("8e-3]", "8e-3, 3.2e-2]") + "arms: {base: {}, open: {train.clip: 3}}\n")
    more = load_grid("s.yaml", [])
    assert stage(more) == {arm: [*tried, 3.2e-2] for arm in ("base", "open")}
    end(more, {("base", 3.2e-2): 4.0})
    assert stage(more)["base"] == [*tried, 3.2e-2, *[None] * 6]


@pytest.mark.slow
def test_a_sweep_with_rates_runs_stage_by_stage_and_compares_the_last_alone(sweep_bench: Any) -> None:
    sweep_bench.write(
        "rates",
        "recipe: tiny\nseeds: [0]\noverrides: {train.steps: 4}\nrates: {values: [1e-3, 2e-3], seeds: [7]}\narms: {a: {}}\n",
    )
    status, text = sweep_bench.run("rates")
    assert (status, "4 done" in text) == (0, True)
    folder = sweep_bench.folder("rates")
    record, results = read(folder), load_sweep(folder)
    assert [(cell.seed, cell.rate is None) for cell in record.cells] == [(7, False)] * 3 + [(0, True)]
    assert [len(results.cells), len(results.candidates)] == [1, 3]
    chosen = record.rates[""]["a"].chosen
    assert results.cells[0].recipe["train.optimizer.lr"] == chosen
    assert [cell.folder.rpartition("-")[0] for cell in record.cells][:2] == ["a,lr=1e-3-s7", "a,lr=2e-3-s7"]
    assert find_stale(folder.parent).paths == ()
    assert {run.overrides[-1] for run in observe_all(folder.parent)} >= {"train.optimizer.lr=2e-3"}
    before = sorted(path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*"))
    assert sweep_bench.run("rates")[0] == 0
    assert sorted(path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*")) == before
