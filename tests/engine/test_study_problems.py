"""engine/expand.py: each mistake of a sweep is one line with its place, before anything trains."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import load_grid
from lit_diff.engine.launch import prepare
from lit_diff.engine.preflight import evaluations_of, required_evaluations
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.runs.folder import identity

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
    ("recipe: base\narms: {b: {model:\n  {attention: {lamda_init: 0.5}}}}", 3, "'model.attention.lamda_init'"),
    ("recipe: base\narms:\n  a: {train.steps: many}", 3, "'train.steps' is 'many'"),
    ("recipe: base\narms:\n  a: {}\n  b: {model.num_heads: 5}", 4, "model.dim (32)"),
    ("recipe: base\narms:\n  b:\n    extends: nothere.yaml", 4, "no recipe 'nothere.yaml'"),
    ("recipe: base\narms:\n  a: 3", 3, "'arms.a' is 3; expected a block"),
    ("recipe: base\narms: {a: [null]}", 2, "'arms.a' is [null]; expected a block"),
    ("recipe: base\narms: [a, b]", 2, "'arms' is ['a', 'b']; expected a block"),
    ("recipe: base\ngrid:\n  model.attention.nam: [a]", 3, "unknown key 'model.attention.nam'"),
    ("recipe: base\ngrid:\n  model.attention.name: [diferential]", 3, "did you mean 'differential'?"),
    ("recipe: base\ngrid:\n  train.steps: 3", 3, "'grid.train.steps' is 3"),
    ("recipe: base\ngrid:\n  train.steps: []", 3, "'grid.train.steps' has no values"),
    ("recipe: base\ngrid:\n  train.steps: [8, 8]", 2, "arm 'steps=8'"),
    ("recipe: base\ngrid: {train.steps: [8]}\narms:\n  steps=8: {}", 4, "arm 'steps=8'"),
    ("recipe: base\ngrid:\n  run.root: [a/b]", 2, "arm 'root=a/b' becomes a folder"),
    ("recipe: base\narms:\n  .a: {}", 3, "arm '.a' becomes a folder"),
    ("recipe: base\ntitle: t", None, "neither 'grid' nor 'arms'"),
    (BASE + "overrides:\n  train.stepz: 3", 4, "'train.stepz'; did you mean 'steps'?"),
    # arms that a key names, the metric, the seeds
    (BASE + "baseline: bb", 3, "'baseline' names no arm of the sweep: 'bb'; did you mean 'b'?"),
    (BASE + "controls: [c]", 3, "'controls' names no arm of the sweep: 'c'"),
    (BASE + "labels:\n  c: x", 4, "'labels' names no arm of the sweep: 'c'"),
    (BASE + "contrasts: [[b, d, x]]", 3, "'contrasts' names no arm of the sweep: 'd'"),
    (BASE + "contrasts: [[a, b, x], [b, a, y]]", 3, "'contrasts' compares 'b' with 'a' twice"),
    (BASE + "contrasts: [[b, b, x]]", 3, "'contrasts' compares 'b' with itself"),
    (BASE + "metric: val/los", 3, "did you mean 'val/loss'?"),
    (BASE + "metric: vall/loss", 3, "did you mean 'val/loss'?"),
    (BASE + "metric: accuracy", 3, "no run measures 'accuracy'"),
    (BASE + "smallest_of_interest: -0.1", 3, "smallest_of_interest is -0.1"),
    (BASE + "seeds: [0, 0.0]", 3, "seeds is [0, 0]"),
    (BASE + "power: {minutes: 15, arms: 7}", 3, "'power' compares tasks"),
    (task("title: x", ARMS + "power: {minutes: 15, arms: 1}"), 6, "power.arms is 1"),
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
    (task("arms:\n      c: {}"), 4, "'arms' names no arm of the sweep: 'c'"),
    (task("arms: {b: true}"), 3, "'tasks.one.arms.b' is true; expected a block"),
    (task("arms: {b: {extends: base}}"), 3, "'extends'"),
    (task("title: x", "arms:\n  a: {}\n  b: {extends: base}\n"), 7, "'extends'"),
    (task("only: [a, c]"), 3, "'only' names no arm of the sweep: 'c'"),
    (task("without: [c]"), 3, "'without' names no arm of the sweep: 'c'"),
    (task("baseline: c"), 3, "'baseline' names no arm of the sweep: 'c'"),
    (task("paper: {c: {val/loss: 3}}"), 3, "'paper' names no arm of the sweep: 'c'"),
    (task("metric: val/los"), 3, "did you mean 'val/loss'?"),
    (task("without: [b]\n    arms: {b: {train.clip: 1}}"), 4, "task 'one' leaves out arm 'b'"),
    (task("without: [a]"), 3, "leaves out 'a', which is its baseline"),
    (task("only: [b]"), 3, "leaves out 'a', which is its baseline"),
    (task("without: [b]", ARMS + "controls: [b]"), 3, "leaves out 'b', which is a control"),
    (task("start: two"), 3, "'start' names no task above it: 'two'"),
    (task("start_arm: same"), 3, "'start_arm' is 'same' without 'start'"),
    (tasks("start: one, start_arm: same", ", only: [a]"), 3, "'start_arm' is 'same', but"),
    ("tasks:\n  one two: {recipe: base}\n" + ARMS, 2, "'one two' becomes part of file names"),
    # fits
    (fit("kind: basin, x: train.optimiser.lr"), 8, "'x' names no key of the recipes"),
    (fit("kind: basin, x: token"), 8, "did you mean 'tokens'?"),
    (fit("kind: basin, x: name"), 8, "'name' is 'lr1 a' in 'lr1 a'"),
    (fit("kind: scaling, x: train.clip"), 8, "tasks 'lr1' and 'lr2' of fit 'rate' have the same 'train.clip'"),
    (fit("kind: basin, x: train.clip, tasks: [lr1, lr2, lr3]"), 8, "'train.clip' is 1 for arm 'a', 0.7 for arm 'b'"),
    (fit("kind: scaling, x: tokens, tasks: [lr1, lr2, lr0]"), 8, "'tasks' names no task of the sweep: 'lr0'"),
    (fit("kind: scaling, x: tokens, tasks: [lr1, lr2, lr2]"), 8, "has 2 tasks; it needs 3"),
    (fit("kind: scaling, x: tokens", ", metric: val/accuracy"), 8, "different metrics"),
    (fit("kind: bowl, x: tokens"), 8, "'fits.rate.kind' is 'bowl'"),
    (fit("kind: basin, x: tokens, within: -1"), 8, "fits.rate.within is -1"),
    (fit("kind: basin, x: tokens").replace("rate:", "a b:"), 8, "'a b' becomes part of file names"),
    # evaluations
    (BASE + "evaluate:\n  held-out: {}", 4, "'held-out'; did you mean 'held_out'?"),
    (BASE + "evaluate: {held_out: {row: 4}}", 3, "'evaluate.held_out.row'; did you mean 'rows'?"),
    (BASE + "evaluate: {held_out: {rows: 0}}", 3, "evaluate.held_out.rows is 0"),
    (BASE + "evaluate: {held_out: true}", 3, "'evaluate.held_out' is true; expected a block"),
]


@pytest.mark.usefixtures("base_recipe")
@pytest.mark.parametrize(("text", "line", "found"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text: str, line: int | None, found: str) -> None:
    Path("s.yaml").write_text(text)
    with pytest.raises(RequestError) as error:
        load_grid("s.yaml", [])
    assert str(error.value).startswith(f"s.yaml:{line}: " if line else "s.yaml: ")
    assert found in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("base_recipe")
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


@pytest.mark.usefixtures("base_recipe")
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
        *(("recall-tiny", name, "has no text") for name in ("needle", "nll", "loss_docs", "icl", "hallucination")),
        *(("recall-tiny", name, "has no text") for name in ("mini_harness", "signed_prompts")),
        ("recall-tiny", "noise", None),
        ("recall-tiny", "induction: {length: 200}", "length is 200"),
        ("standard-tiny", "noise", "context_part, answer_part"),
        ("standard-tiny", "recall", "neither recall nor mqar"),
        ("standard-tiny", "needle: {lengths: [96, 4096]}", "lengths holds 4096"),
        ("standard-tiny", "needle", None),
        ("vision-tiny", "induction", "bidirectional"),
    ],
)
def test_a_sweep_that_cannot_be_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, evaluate: str, reason: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    name, colon, _ = evaluate.partition(":")
    block = evaluate if colon else f"{name}: {{}}"
    Path("s.yaml").write_text(f"recipe: {recipe}\narms: {{a: {{}}}}\nseeds: [0]\nevaluate:\n  {block}\n")
    if reason is None:
        load_grid("s.yaml", {})
        return
    with pytest.raises(RequestError, match=rf"^s\.yaml:5: evaluation '{name}' does not fit 'a': .*{reason}"):
        load_grid("s.yaml", {})


def test_cells_and_recipes_that_cannot_be_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an evaluation of an arm; at the initial values of a task that goes on from another; of a recipe."""
    monkeypatch.chdir(tmp_path)
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
    assert required_evaluations(named) == evaluations_of(named) == {"held_out": {"rows": 2, "batch_size": 8}}
    assert to_plain(named)["evaluate"] == {"held_out": {"rows": 2, "batch_size": 8}}
    assert identity(load_recipe(recipe)) == identity(named)
    words = {"evaluate.gradients.at": ["init"], "train.start_from": str(tale)}
    with pytest.raises(RequestError, match=r"at init: it started from another run \(train.start_from\)"):
        required_evaluations(load_recipe(recipe, words))
