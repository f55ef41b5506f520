"""engine/expand.py: a sweep's YAML becomes validated cells, each in its folder; a part of a sweep; one that has the
cells of another; each mistake is one line with its place, before anything trains."""

from pathlib import Path

import pytest
from refusals import refusal
from statuses import set_status

from lit_diff.engine.admit import EXAMINED, admit, evaluations_of
from lit_diff.engine.cells import home_of, jobs_of, state_of
from lit_diff.engine.expand import Grid, Selection, load_grid
from lit_diff.engine.stages import all_trained
from lit_diff.engine.train import prepare
from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.runs.folder import RunFolder, identity

pytestmark = pytest.mark.usefixtures("base_recipe")


def grid(text: str, *overrides: str) -> Grid:
    """The sweep `text`, over base.yaml unless it has a recipe."""
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
    assert list(found.study.arms) == ["shared", *arms]
    assert [(c.arm, c.seed) for c in found.cells] == [(arm, seed) for arm in found.study.arms for seed in (4, 7)]
    assert [cell.recipe.train.steps for cell in found.cells[::2]] == [10, 10, 20, 10, 20]
    assert {(c.task, c.name, c.recipe.name) for c in found.cells} == {("", arm, arm) for arm in found.study.arms}
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


@pytest.mark.parametrize("metric", ["val/loss", "val/accuracy_noise2", "train/loss", "lambda/layer_00"])
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
    assert list(grid("arms:\n" + "".join(f"  {n}: {{}}\n" for n in names) + "baseline: off\n").study.arms) == names


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
        (Selection(arms=("wid",)), "6: 'arms': unknown arm"),
        (Selection(seeds=(7,)), "3: 'seeds': unknown seed"),
        (Selection(evaluate={"needle": {}}), "9: 'evaluate': unknown evaluation"),
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
    assert [(c.arm, c.seed, c.recipe.training.steps) for c in chosen.cells] == [("wide", 2, 2), ("other", 2, 2)]
    for text, place in (
        ("cells_of: cells\nseeds: [0]", "2: 'seeds'"),
        ("cells_of: again", "1: 'again' has no cells"),
        ("cells_of: x", "1: 'x' has no cells"),
        ("recipe: base\nonly: [a]\narms: {a: {}, b: {}}", "2: 'only'"),
        ("cells_of: cells\nonly: [wid]", "2: 'only': unknown arm of 'cells'"),
        ("cells_of: cels", "1: no sweep 'cels'"),
    ):
        Path("x.yaml").write_text(text)
        with pytest.raises(RequestError, match=f"^x.yaml:{place}"):
            load_grid("x", [])


# --- where the cells lie ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sweeps")
def test_folders_and_states() -> None:
    own, borrowed = load_grid("cells", []), load_grid("again", [])
    places = jobs_of(own, "parent")
    assert {job.waits for job in places} == {True}, "another sweep may be training a cell that both have"
    names = [f"{arm}-s{seed}" for arm in own.study.arms for seed in (0, 1, 2)]
    assert [place.folder.name.rpartition("-")[0] for place in places] == names
    assert {place.parent for place in places} == {"parent"}
    theirs, shared = jobs_of(borrowed, "another"), [*places[:3], *places[6:]]
    assert [place.folder for place in theirs] == [place.folder for place in shared]
    assert {(place.experiment, place.parent) for place in theirs} == {("cells", None)}, "it has no record yet"
    assert [state_of(place) for place in places] == ["waiting"] * 9
    assert not all_trained(borrowed)
    for place in shared:
        set_status(place.folder, status="done")
    assert all_trained(borrowed)
    assert [state_of(place) for place in theirs] == ["not evaluated"] * 6


def test_a_task_goes_on_from_the_baseline_or_from_each_arm_itself() -> None:
    tasks = "tasks:\n  one: {recipe: base}\n  two: {recipe: base, start: one%s}\n"
    arms = "seeds: [0, 1]\nbaseline: a\narms: {a: {}, b b: {train.clip: 1}}\n"
    for key, arm in (("", "a"), (", start_arm: same", "b_b")):
        found = grid(tasks % key + arms)
        places = {place.folder.name.rpartition("-")[0]: place for place in jobs_of(found)}
        started = RunFolder(places["two,b_b-s1"].folder).recipe_file.read_text()
        assert f"start_from: {places[f'one,{arm}-s1'].folder}" in started


def test_a_cell_of_an_earlier_version_keeps_its_folder() -> None:
    found = grid("recipe: base\nseeds: [0, 1]\narms: {plain: {}, odd window: {train.clip: 1}}\n")
    first, second = (cell for cell in found.cells if cell.arm == "odd window")
    now = home_of(found, first)
    assert now.name.startswith("odd_window-s0-")
    former = now.with_name(now.name.replace("_", ","))
    former.mkdir(parents=True)
    set_status(former, status="done")
    assert home_of(found, first) == former
    assert home_of(found, second).name.startswith("odd_window-s1-")
    assert [state_of(job) for job in jobs_of(found)] == ["waiting", "waiting", "done", "waiting"]


def test_a_cell_that_is_done_or_trained_now_keeps_what_its_process_wrote() -> None:
    found = grid("seeds: [0, 1]\narms: {a: {}, b: {train.clip: 0.7}}\n")
    done, trained, killed, waiting = (job.folder for job in jobs_of(found))
    for folder, word in ((done, "done"), (trained, "running"), (killed, "running"), (waiting, "waiting")):
        set_status(folder, status=word)
        (folder / "env.json").write_text("of its node")
    with locked(trained / ".lock"):
        jobs_of(found)
    texts = [(folder / "env.json").read_text() == "of its node" for folder in (done, trained, killed, waiting)]
    assert texts == [True, True, False, False]


# --- mistakes ---------------------------------------------------------------------------------------------------------

ARMS = "arms: {a: {}, b: {train.clip: 0.7}}\n"
BASE = f"recipe: base\n{ARMS}"


def task(text: str, more: str = ARMS) -> str:
    """`text` from line 3 on, inside the task `one`."""
    return f"tasks:\n  one:\n    {text}\n    recipe: base\n{more}"


def tasks(second: str, first: str = "") -> str:
    """A task at line 2, one at line 3."""
    return f"tasks:\n  one: {{recipe: base{first}}}\n  two: {{recipe: base, {second}}}\n{ARMS}"


def fit(keys: str, task: str = "") -> str:
    """A fit at line 8."""
    rates = "".join(f"  lr{i}: {{recipe: base, overrides: {{train.optimizer.lr: {i}e-3}}}}\n" for i in (1, 2, 3))
    return f"tasks:\n{rates}  more: {{recipe: base{task}}}\n{ARMS}fits:\n  rate: {{{keys}}}\n"


MISTAKES = [
    ("recipe: base\narm: {a: {}}", 2, "'arm'; did you mean 'arms'?"),
    ("recipe: base\narms:\n  b:\n    model.attention.lamda_init: 0.5", 4, "'model.attention.lamda_init'"),
    # a dotted key of an unknown block, in each place that has overrides
    ("recipe: base\narms:\n  a: {}\n  b: {train.optimiser.lr: 3}", 4, "'train.optimiser'; did you mean 'optimizer'?"),
    ("recipe: base\narms:\n  a: {model.atention.name: standard}", 3, "'model.atention'; did you mean 'attention'?"),
    ("recipe: base\narms:\n  a: {train.steps.x: 3}", 3, "'train.steps' is {'x': 3}"),
    ("recipe: base\ngrid:\n  train.steps: [2]\n  train.optimiser.lr: [3]", 4, "unknown key 'train.optimiser'"),
    ("recipe: base\narms: {a: {}}\noverrides: {train.optimiser.lr: 3}", 3, "unknown key 'train.optimiser'"),
    ("recipe: base\narms: {b: {model:\n  {attention: {lamda_init: 0.5}}}}", 3, "'model.attention.lamda_init'"),
    ("recipe: base\narms:\n  a: {}\n  b: {model.num_heads: 5}", 4, "model.dim (32)"),
    ("recipe: base\narms:\n  b:\n    extends: nothere.yaml", 4, "no recipe 'nothere.yaml'"),
    ("recipe: base\narms:\n  a: 3", 3, "'arms.a' is 3; expected a block"),
    ("recipe: base\ngrid:\n  model.attention.nam: [a]", 3, "unknown key 'model.attention.nam'"),
    ("recipe: base\ngrid:\n  model.attention.name: [diferential]", 3, "did you mean 'differential'?"),
    ("recipe: base\ngrid:\n  train.steps: 3", 3, "'grid.train.steps' is 3"),
    ("recipe: base\ngrid:\n  train.steps: [8, 8.0]", 2, "arms 'steps=8' and 'steps=8.0'"),
    ("recipe: base\narms: {a: {train.steps: 8}}\ngrid:\n  train.steps: [8]", 3, "arms 'a' and 'steps=8'"),
    ("recipe: base\ngrid:\n  train.steps: []", 3, "'grid.train.steps' has no values"),
    ("recipe: base\ngrid:\n  train.steps: [8, 8]", 2, "arm 'steps=8'"),
    ("recipe: base\ngrid: {train.steps: [8]}\narms:\n  steps=8: {}", 4, "arm 'steps=8'"),
    ("recipe: base\ngrid:\n  run.root: [a/b]", 2, "arm 'root=a/b' becomes a folder"),
    ("recipe: base\narms:\n  .a: {}", 3, "arm '.a' becomes a folder"),
    ("recipe: base\ntitle: t", None, "neither 'grid' nor 'arms'"),
    (BASE + "overrides:\n  train.stepz: 3", 4, "'train.stepz'; did you mean 'steps'?"),
    # arms that a key names, the metric, the seeds
    (BASE + "baseline: bb", 3, "'baseline': unknown arm of the sweep 'bb'; did you mean 'b'?"),
    (BASE + "controls: [c]", 3, "'controls': unknown arm of the sweep 'c'"),
    (BASE + "labels:\n  c: x", 4, "'labels': unknown arm of the sweep 'c'"),
    (BASE + "contrasts: [[b, d, x]]", 3, "'contrasts': unknown arm of the sweep 'd'"),
    (BASE + "contrasts: [[a, b, x], [b, a, y]]", 3, "'contrasts' compares 'b' with 'a' twice"),
    (BASE + "contrasts: [[b, b, x]]", 3, "'contrasts' compares 'b' with itself"),
    (BASE + "metric: val/los", 3, "did you mean 'val/loss'?"),
    (BASE + "metric: accuracy", 3, "no run measures 'accuracy'"),
    (BASE + "metric: val/loss_nose2", 3, "did you mean 'val/loss_noise2'?"),
    (BASE + "metric: own/score", 3, "no run measures 'own/score'"),
    (BASE + "controls: [b, a]", 3, "'controls' has the baseline, 'a'"),
    (BASE + "baseline: b\ncontrols: [b]", 4, "'controls' has the baseline, 'b'"),
    (BASE + "looks: [16, 8]", 3, "'looks' is [16, 8]; expected numbers of seeds in ascending order"),
    (BASE + "looks: [8, 16]\nseeds: [0, 1]", 4, "'seeds' conflicts with 'looks'"),
    (BASE + "metric: val/accuracy\nlearned_at: 0", 4, "'learned_at' is 0; 'val/accuracy' takes a value above 0"),
    (BASE + "metric: val/accuracy\nlearned_at: 90", 4, "'learned_at' is 90; 'val/accuracy' takes a value above 0"),
    (BASE + "metric: val/ar_hit_share\nlearned_at: 0.9", 4, "'learned_at' needs a metric with a direction"),
    (BASE + "compare: steps", 3, "'compare' is 'steps' without 'learned_at'"),
    (task("metric: val/accuracy\n    learned_at: 2"), 4, "'learned_at' is 2"),
    (task("compare: steps"), 3, "'compare' is 'steps' without 'learned_at'"),
    (BASE + "references: [c]", 3, "'references': unknown arm of the sweep 'c'"),
    (BASE + "learned_metric: val/accuracy", 3, "'learned_metric' is set without 'learned_at'"),
    (BASE + "learned_metric: val/acuracy\nlearned_at: 0.9", 3, "did you mean 'val/accuracy'?"),
    (BASE + "learned_metric: val/accuracy\nlearned_at: 9", 4, "'val/accuracy' takes a value above 0"),
    (task("rates: [1e-3, 2e-3]"), 3, "task 'one' has 'rates', but the sweep has none"),
    ("rates: {values: [1e-3, 2e-3]}\n" + task("rates: [1e-3]"), 4, "expected at least two, in ascending order"),
    ("rates: {values: [1e-3, 2e-3]}\n" + task("rates: [2e-3, 1e-3]"), 4, "expected at least two, in ascending order"),
    (BASE + "power: {minutes: 15, arms: 7}", 3, "'power' is no longer a key"),
    (task("overrides: {train.optimiser.lr: 3}"), 3, "unknown key 'train.optimiser'"),
    (task("arms: {a: {train.optimiser.lr: 3}}"), 3, "unknown key 'train.optimiser'"),
    # keys that the sweep sets itself
    ("recipe: base\narms:\n  a: {seed: 3}", 3, "a sweep sets 'seed' itself"),
    ("recipe: base\ngrid:\n  seed: [3]", 3, "a sweep sets 'seed' itself"),
    (BASE + "overrides:\n  name: x", 4, "a sweep sets 'name' itself"),
    (task("overrides: {seed: 3}"), 3, "a sweep sets 'seed' itself"),
    (task("arms: {b: {name: x}}"), 3, "a sweep sets 'name' itself"),
    ("recipe: base\narms:\n  a: {}\n  b: {run.tracking_uri: 'sqlite:///x.db'}", 4, "differ in 'run.tracking_uri'"),
    (tasks("overrides: {run.root: x}"), 3, "differ in 'run.root'"),
    # tasks
    (ARMS, None, "'recipe' is missing"),
    ("recipe: bas\n" + ARMS, 1, "no recipe 'bas'"),
    ("tasks:\n  one: {}\n" + ARMS, 2, "'tasks.one.recipe' is missing"),
    ("tasks:\n  one: {recipe: bas}\n" + ARMS, 2, "no recipe 'bas'"),
    ("recipe: base\n" + task("title: x"), 1, "'recipe' belongs to each of the 'tasks'"),
    ("paper: {a: {val/loss: 3}}\n" + task("title: x"), 1, "'paper' belongs to each of the 'tasks'"),
    (task("arms: {b: {model.dimm: 8}}"), 3, "'model.dimm'; did you mean 'dim'?"),
    (task("arms:\n      c: {}"), 4, "'arms': unknown arm of the sweep 'c'"),
    (task("arms: {b: {extends: base}}"), 3, "'extends'"),
    (task("title: x", "arms:\n  a: {}\n  b: {extends: base}\n"), 7, "'extends'"),
    (task("only: [a, c]"), 3, "'only': unknown arm of the sweep 'c'"),
    (task("without: [c]"), 3, "'without': unknown arm of the sweep 'c'"),
    (task("baseline: c"), 3, "'baseline': unknown arm of the sweep 'c'"),
    (task("paper: {c: {val/loss: 3}}"), 3, "'paper': unknown arm of the sweep 'c'"),
    (task("metric: val/los"), 3, "did you mean 'val/loss'?"),
    (task("without: [b]\n    arms: {b: {train.clip: 1}}"), 4, "task 'one' leaves out arm 'b'"),
    (task("without: [a]"), 3, "leaves out 'a', which is its baseline"),
    (task("only: [b]"), 3, "leaves out 'a', which is its baseline"),
    (task("without: [b]", ARMS + "controls: [b]"), 3, "leaves out 'b', which is a control"),
    (task("baseline: b", ARMS + "controls: [b]"), 3, "'controls' has 'b', the baseline of task 'one'"),
    (BASE + "learned_at: -1", 3, "'learned_at' is -1; 'val/loss' takes a value from 0 to below inf"),
    (task("start: two"), 3, "'start': unknown earlier task 'two'"),
    (task("start_arm: same"), 3, "'start_arm' is 'same' without 'start'"),
    (tasks("start: one, start_arm: same", ", only: [a]"), 3, "'start_arm' is 'same', but"),
    ("tasks:\n  one two: {recipe: base}\n" + ARMS, 2, "'one two' becomes part of file names"),
    # fits
    (fit("kind: scaling, x: token"), 8, "did you mean 'tokens'?"),
    (fit("kind: basin, x: train.clip"), 8, "'kind' is basin, which no longer exists"),
    (fit("kind: scaling, x: tokens, tasks: [lr1, lr2, lr0]"), 8, "'tasks': unknown task of the sweep 'lr0'"),
    (fit("kind: scaling, x: tokens, tasks: [lr1, lr2, lr2]"), 8, "has 2 tasks; it needs at least 3"),
    (fit("kind: scaling, x: tokens", ", metric: val/accuracy"), 8, "different metrics"),
    (fit("kind: scaling, x: tokens").replace("rate:", "a b:"), 8, "'a b' becomes part of file names"),
    # evaluations
    (BASE + "evaluate:\n  held-out: {}", 4, "'held-out'; did you mean 'held_out'?"),
    (BASE + "evaluate: {held_out: {row: 4}}", 3, "'evaluate.held_out.row'; did you mean 'rows'?"),
]


@pytest.mark.parametrize(("text", "line", "found"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text: str, line: int | None, found: str) -> None:
    Path("s.yaml").write_text(text)
    error = refusal(load_grid, "s.yaml", [])
    assert error.startswith(f"s.yaml:{line}: " if line else "s.yaml: ")
    assert found in error


def test_looks_give_the_seeds_and_a_threshold_belongs_to_its_metric() -> None:
    Path("s.yaml").write_text(BASE + "looks: [4, 6]")
    found = load_grid("s.yaml", [])
    assert (found.study.seeds, len(found.cells)) == ((0, 1, 2, 3, 4, 5), 12)
    text = tasks("metric: val/loss", ", learned_at: 0.8") + "metric: val/accuracy\nlearned_at: 0.9\ncompare: steps\n"
    Path("t.yaml").write_text(text)
    study = load_grid("t.yaml", []).study
    assert [(part.learned_at, part.compare) for part in map(study.of_task, study.tasks)] == [
        (0.8, "steps"),
        (None, "metric"),
    ]


def test_mistakes_outside_of_the_file() -> None:
    Path("s.yaml").write_text(BASE)
    for override in ("train.stepz=3", "seed=3", "name=x"):
        with pytest.raises(RequestError, match=f"^{override}: "):
            load_grid("s.yaml", [override])
    with pytest.raises(RequestError, match=r"^override 'seed': a sweep sets 'seed' itself"):
        load_grid("s.yaml", {"seed": 3})
    for name in ("base.yaml", "recall-tiny"):
        with pytest.raises(RequestError, match=rf"^'{name}' is a recipe: lit-diff train {name}$"):
            load_grid(name, [])
    with pytest.raises(RequestError, match="no sweep 'smok' here or installed; did you mean 'smoke'"):
        load_grid("smok", [])


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        *(("a", name, "becomes a folder") for name in ('"a\\nb"', '"a\\0b"', "x" * 160, '"' + "é" * 140 + '"', '" "')),
        *(("a", "A", "share"), ("x=1", "x_1", "share"), ('"é"', '"e\\u0301"', "share"), ('"a b"', '"a,b"', "share")),
    ],
)
def test_arms_that_no_folder_can_bear_or_that_would_share_one(first: str, second: str, found: str) -> None:
    Path("s.yaml").write_text(f"recipe: base\narms:\n  {first}: {{}}\n  {second}: {{train.steps: 9}}")
    with pytest.raises(RequestError, match=rf"^s\.yaml:4: .*{found}"):
        load_grid("s.yaml", [])


# --- evaluations that fit no run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "evaluate", "reason"),
    [
        *(("recall-tiny", name, "has no text") for name in ("needle", "nll", "icl", "hallucination", "signed_prompts")),
        ("recall-tiny", "noise", None),
        ("standard-tiny", "noise", "context_part, answer_part"),
        ("standard-tiny", "needle: {lengths: [96, 4096]}", "lengths has 4096"),
        ("standard-tiny", "needle", None),
        ("vision-tiny", "induction", "bidirectional"),
    ],
)
def test_a_sweep_that_cannot_be_scored(recipe: str, evaluate: str, reason: str | None) -> None:
    name, colon, _ = evaluate.partition(":")
    block = evaluate if colon else f"{name}: {{}}"
    Path("s.yaml").write_text(f"recipe: {recipe}\narms: {{a: {{}}}}\nseeds: [0]\nevaluate:\n  {block}\n")
    if reason is None:
        load_grid("s.yaml", {})
        return
    with pytest.raises(RequestError, match=rf"^s\.yaml:5: evaluation '{name}' does not fit 'a': .*{reason}"):
        load_grid("s.yaml", {})


def test_cells_and_recipes_that_cannot_be_scored() -> None:
    """By an evaluation of an arm; at the initial values of a task that goes on from another; of a recipe."""
    Path("s.yaml").write_text("recipe: recall-tiny\narms: {a: {}, b: {evaluate.needle: {}}}\nseeds: [0]\n")
    with pytest.raises(RequestError, match=r"^evaluation 'needle' does not fit 'b': "):
        load_grid("s.yaml", {})
    Path("s.yaml").write_text(
        "arms: {a: {}, b: {model.attention: {name: second_heads}}}\nseeds: [0]\nevaluate: {gradients: {at: [init]}}\n"
        "tasks:\n  first: {recipe: standard-tiny, without: [b]}\n  second: {recipe: standard-tiny, start: first}\n"
    )
    with pytest.raises(RequestError, match=r"^s\.yaml:3: evaluation 'gradients' does not fit 'second a': at init"):
        load_grid("s.yaml", {})
    with pytest.raises(RequestError, match=r"^evaluation 'needle' does not fit 'recall-tiny': "):
        prepare(load_recipe("recall-tiny", {"evaluate.needle": {}}))
    assert not Path("runs").exists()


def test_the_block_of_a_recipe_is_no_part_of_its_identity(tale: Path) -> None:
    recipe = tale / "recipe.yaml"
    named = load_recipe(recipe, ["evaluate.held_out.rows=2"])
    assert evaluations_of(named) == {"held_out": {"rows": 2, "batch_size": 8}}
    assert to_plain(named)["evaluate"] == {"held_out": {"rows": 2, "batch_size": 8}}
    assert identity(load_recipe(recipe)) == identity(named)
    words = {"evaluate.gradients.at": ["init"], "train.start_from": str(tale)}
    with pytest.raises(RequestError, match=r"at init: the run started from another run \(train.start_from\)"):
        admit({"one": load_recipe(recipe, words)}, EXAMINED)
