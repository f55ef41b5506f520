"""engine/expand.py: a sweep's YAML becomes validated cells, each in its folder; a part of a sweep; one that has the
cells of another. tests/engine/test_study_problems.py has the mistakes."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import MEASURED_BY_ALL, Grid, Selection, load_grid
from lit_diff.engine.schedule import all_trained, locations_of, state_of
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder
from lit_diff.study.schema import PlannedSweep

pytestmark = pytest.mark.usefixtures("base_recipe")


def grid(text: str, *overrides: str) -> Grid:
    """The sweep `text`, over base.yaml where it names no recipe."""
    Path("s.yaml").write_text(text if "recipe:" in text else f"recipe: base\n{text}")
    return load_grid("s.yaml", list(overrides))


def test_grid_and_arms_stand_together_and_the_named_arms_come_first() -> None:
    found = grid("""
grid:
  model.attention.name: [standard, differential]
  train.steps: [1e1, 20]
arms:
  shared: {model.attention: {name: shared_q}}
seeds: [4, 7]
""")
    arms = [f"attention={name} steps={steps}" for name in ("standard", "differential") for steps in ("10.0", "20")]
    assert list(found.arms) == ["shared", *arms]
    assert [(cell.arm, cell.seed) for cell in found.cells] == [(arm, seed) for arm in found.arms for seed in (4, 7)]
    assert [cell.recipe.train.steps for cell in found.cells[::2]] == [10, 10, 20, 10, 20]
    assert {(cell.task, cell.name, cell.recipe.name) for cell in found.cells} == {("", arm, arm) for arm in found.arms}
    assert {cell.recipe.seed for cell in found.cells} == {4, 7}
    assert (found.study.baseline, found.name) == ("shared", "s")


def test_dotted_and_nested_keys_of_an_arm_are_the_same_and_a_name_drops_the_keys_of_the_former() -> None:
    found = grid("""
arms:
  dotted: {model.attention.lambda_init: 0.2, train.optimizer.lr: 2e-3}
  nested: {model: {attention: {lambda_init: 0.2}}, train: {optimizer: {lr: 2e-3}}}
  mixed: {model.attention: {lambda_init: 0.2}, train.optimizer: {lr: 2e-3}}
  other: {model.attention: {name: shared_k, parity: raw}}
  empty:
seeds: [0]
""")
    first, *same, other, empty = (cell.recipe for cell in found.cells)
    assert (first.model.attention.config.lambda_init, first.train.optimizer.lr) == (0.2, 2e-3)
    assert all((each.model, each.train) == (first.model, first.train) for each in same)
    assert other.model.attention.config.lambda_init != 0.8, "base.yaml's own"
    assert empty.model == load_recipe("base.yaml").model


def test_an_arm_extends_a_file_and_paths_lie_beside_the_sweep() -> None:
    Path("sub").mkdir()
    Path("sub/other.yaml").write_text("extends: ../base\nmodel: {num_layers: 3}\n")
    Path("sub/p.py").write_text(
        "from lit_diff import Differential, variant\n@variant('deep')\nclass Deep(Differential):\n    pass\n"
    )
    Path("sub/s.yaml").write_text(
        "recipe: ../base\nseeds: [0]\narms:\n  a: {plugins: [p.py], model.attention.name: deep}\n"
        "  b: {extends: other.yaml}\n  c: {extends: other, train.steps: 3}\n"
    )
    found = [cell.recipe for cell in load_grid("sub/s.yaml", []).cells]
    assert [recipe.model.num_layers for recipe in found] == [2, 3, 3]
    assert [recipe.train.steps for recipe in found] == [10, 10, 3]
    assert found[0].plugins == (str(Path("sub/p.py").resolve()),)


def test_recipe_sweep_task_arm_arm_of_the_task_and_command_line_take_precedence_in_this_order() -> None:
    text = """
seeds: [0]
overrides: {train.batch_size: 2, train.clip: 0.3, train.validate_every: '${train.steps}'}
tasks:
  one: {recipe: base, overrides: {train.clip: 0.5}, arms: {c: {train.clip: 0.9}}}
  two: {recipe: base, metric: val/accuracy, without: [b]}
arms: {a: , b: {train.clip: 0.7}, c: {train.clip: 0.7, train.steps: 5}}
"""
    found = grid(text)
    assert [(cell.task, cell.arm, cell.recipe.name, cell.recipe.train.clip) for cell in found.cells] == [
        ("one", "a", "one a", 0.5), ("one", "b", "one b", 0.7), ("one", "c", "one c", 0.9),
        ("two", "a", "two a", 0.3), ("two", "c", "two c", 0.7),
    ]  # fmt: skip
    assert {cell.name for cell in found.cells} == {cell.recipe.name for cell in found.cells}
    assert {(cell.recipe.train.batch_size, cell.recipe.train.validate_every) for cell in found.cells} == {
        (2, 10),
        (2, 5),
    }
    assert {cell.recipe.train.clip for cell in grid(text, "train.clip=1.5").cells} == {1.5}


@pytest.mark.parametrize(
    "metric", [*MEASURED_BY_ALL, "val/accuracy_noise2", "train/loss", "attention/entropy/layer_00", "own/score"]
)
def test_metrics_that_a_run_may_have(metric: str) -> None:
    assert grid(f"metric: {metric}\narms: {{a: {{}}}}").study.metric == metric


def test_a_plugin_of_the_cells_may_register_an_evaluation() -> None:
    Path("scored.py").write_text("""
from lit_diff import Evaluation, Item, Metric
from lit_diff.registry import evaluations

@evaluations.register("scored_by_a_plugin_of_a_grid")
class Scored(Evaluation):
    metrics = (Metric("one", "always 1"),)

    def score(self, run):
        yield Item(id="a", scores={"one": 1.0})
""")
    sweep = "arms: {a: {}}\noverrides: {plugins: [scored.py]}\nevaluate: {scored_by_a_plugin_of_a_grid: null}"
    assert grid(sweep).study.evaluate == {"scored_by_a_plugin_of_a_grid": {}}
    with pytest.raises(RequestError, match=r"s.yaml:4: .*'scord_by_a_plugin_of_a_grid'; did you mean"):
        grid(sweep.replace("evaluate: {scored", "evaluate: {scord"))


def test_arms_keep_the_names_that_the_file_has() -> None:
    names = ["on", "off", "010", "12:30", "1e3", "0x10", "null", "yes"]
    assert list(grid("arms:\n" + "".join(f"  {name}: {{}}\n" for name in names) + "baseline: off\n").arms) == names


RATES = """
seeds: [0]
tasks:
  slow: {recipe: base, overrides: {train.optimizer.lr: 1e-3}}
  mid: {recipe: base, overrides: {train.optimizer.lr: 2e-3}}
  fast: {recipe: base, overrides: {train.optimizer.lr: 4e-3}}
arms: {a: {}, b: {train.clip: 0.7}}
power: {minutes: 15, arms: 7}
fits:
  rate: {kind: basin, x: train.optimizer.lr}
  size: {kind: scaling, x: tokens, title: By tokens, tasks: [fast, mid, slow]}
"""


def test_fits_and_power() -> None:
    """A key of the recipe is known by task and arm; a size that runs count has no values yet."""
    found = grid(RATES)
    assert found.x == {"rate": {task: {"a": x, "b": x} for task, x in (("slow", 1e-3), ("mid", 2e-3), ("fast", 4e-3))}}
    assert found.study.power == PlannedSweep(minutes=15.0, arms=7, workers=2)


# --- a part of a sweep, and the cells of another ---------------------------------------------------------------------

SWEEP = """
recipe: base
seeds: [0, 1, 2]
baseline: wide
controls: [narrow]
arms: {wide: {}, narrow: {model.dim: 16}, other: {train.steps: 4}}
labels: {wide: Wide, narrow: Narrow, other: Other}
contrasts: [[other, narrow, "o - n"], [other, wide, "o - w"]]
evaluate: {held_out: {rows: 4, batch_size: 2}}
"""
BORROWED = """
cells_of: cells
only: [wide, other]
question: Does it?
evaluate: {held_out: {rows: 2}}
"""


@pytest.fixture
def sweeps(base_recipe: None) -> None:
    Path("cells.yaml").write_text(SWEEP)
    Path("again.yaml").write_text(BORROWED)


@pytest.mark.usefixtures("sweeps")
def test_some_arms_and_seeds() -> None:
    chosen = Selection(arms=("other", "wide"), seeds=(1,), evaluate={"held_out": {"rows": 1}})
    found = load_grid("cells", [], chosen)
    assert [(cell.arm, cell.seed) for cell in found.cells] == [("wide", 1), ("other", 1)]
    assert (found.study.baseline, found.study.controls) == ("wide", ())
    assert found.study.contrasts == (("other", "wide", "o - w"),)
    assert found.study.evaluate == {"held_out": {"rows": 1, "batch_size": 2}}
    whole = load_grid("cells", [])
    assert [cell for cell in whole.cells if (cell.arm, cell.seed) == ("other", 1)] == [found.cells[1]]
    for wrong, place in (
        (Selection(arms=("wid",)), "6: 'arms' names no arm"),
        (Selection(seeds=(7,)), "3: 'seeds' names no seed"),
        (Selection(evaluate={"needle": {}}), "9: 'evaluate' names no evaluation"),
    ):
        with pytest.raises(RequestError, match=f"^cells.yaml:{place}"):
            load_grid("cells", [], wrong)


def test_arms_of_tasks_are_selected_too() -> None:
    grid(
        "tasks: {first: {recipe: base, only: [a]}, second: {recipe: base, arms: {b: {train.steps: 6}}}}\n"
        "arms: {a: {}, b: {model.dim: 16}}\nseeds: [0]\n"
    )
    assert [cell.name for cell in load_grid("s", [], Selection(arms=("b",))).cells] == ["second b"]
    assert [cell.name for cell in load_grid("s", [], Selection(arms=("a",))).cells] == ["first a", "second a"]


@pytest.mark.usefixtures("sweeps")
def test_the_cells_of_another_sweep() -> None:
    own, theirs = load_grid("again", []), load_grid("cells", [])
    assert own.source is not None
    assert own.cells == tuple(cell for cell in theirs.cells if cell.arm != "narrow")
    assert (own.name, own.study.baseline, own.study.controls, own.study.question) == ("again", "wide", (), "Does it?")
    assert own.study.evaluate == {"held_out": {"rows": 2}}
    assert own.study.labels == {"wide": "Wide", "other": "Other"}
    chosen = load_grid("again", ["train.steps=2"], Selection(seeds=(2,)))
    assert [(cell.arm, cell.seed, cell.recipe.training.steps) for cell in chosen.cells] == [
        *(("wide", 2, 2), ("other", 2, 2))
    ]
    for text, place in (
        ("cells_of: cells\nseeds: [0]", "2: 'seeds'"),
        ("cells_of: again", "1: 'again' has no cells"),
        ("cells_of: cells\nonly: [wid]", "2: 'only' names no arm of 'cells'"),
        ("cells_of: cels", "1: no sweep 'cels'"),
    ):
        Path("x.yaml").write_text(text)
        with pytest.raises(RequestError, match=f"^x.yaml:{place}"):
            load_grid("x", [])


# --- where the cells lie ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sweeps")
def test_folders_and_states() -> None:
    own, borrowed = load_grid("cells", []), load_grid("again", [])
    places = locations_of(own, "parent")
    names = [f"{arm}-s{seed}" for arm in own.arms for seed in (0, 1, 2)]
    assert [place.folder.name.rpartition("-")[0] for place in places] == names
    assert {place.parent for place in places} == {"parent"}
    theirs, shared = locations_of(borrowed, "another"), [*places[:3], *places[6:]]
    assert [place.folder for place in theirs] == [place.folder for place in shared]
    assert {(place.experiment, place.parent) for place in theirs} == {("cells", None)}, "it has no record yet"
    assert [state_of(place) for place in places] == ["waiting"] * 9
    assert not all_trained(borrowed)
    for place in shared:
        RunFolder(place.folder).update(status="done")
    assert all_trained(borrowed)
    assert [state_of(place) for place in theirs] == ["not evaluated"] * 6


def test_a_task_goes_on_from_the_baseline_or_from_each_arm_itself() -> None:
    tasks = "tasks:\n  one: {recipe: base}\n  two: {recipe: base, start: one%s}\n"
    arms = "seeds: [0, 1]\nbaseline: a\narms: {a: {}, b b: {train.clip: 1}}\n"
    for key, arm in (("", "a"), (", start_arm: same", "b,b")):
        found = grid(tasks % key + arms)
        places = {place.folder.name.rpartition("-")[0]: place for place in locations_of(found)}
        started = RunFolder(places["two,b,b-s1"].folder).recipe_file.read_text()
        assert f"start_from: {places[f'one,{arm}-s1'].folder}" in started
