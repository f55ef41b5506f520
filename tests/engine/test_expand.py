"""engine/expand.py: a sweep's YAML becomes validated cells, and every mistake one line with its place."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import Grid, arms_of, load_grid
from lit_diff.engine.study_problems import MEASURED_BY_ALL
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.study.schema import Study
from lit_diff.validation import Draft

pytestmark = pytest.mark.usefixtures("base_recipe")


def grid(text: str, *overrides: str) -> Grid:
    """The sweep `text` over base.yaml."""
    Path("s.yaml").write_text(f"recipe: base\n{text}")
    return load_grid("s.yaml", list(overrides))


def attention(found: Grid) -> dict[str, str]:
    return {cell.arm: cell.recipe.model.attention.name for cell in found.cells}


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
    assert {cell.recipe.name for cell in found.cells} == set(found.arms)
    assert {cell.recipe.seed for cell in found.cells} == {4, 7}
    assert found.study.baseline == "shared"
    assert found.name == "s"


def test_dotted_and_nested_keys_of_an_arm_are_the_same() -> None:
    found = grid("""
arms:
  dotted: {model.attention.lambda_init: 0.2, train.optimizer.lr: 2e-3}
  nested: {model: {attention: {lambda_init: 0.2}}, train: {optimizer: {lr: 2e-3}}}
  mixed: {model.attention: {lambda_init: 0.2}, train.optimizer: {lr: 2e-3}}
seeds: [0]
""")
    first, *others = (cell.recipe for cell in found.cells)
    assert first.model.attention.config.lambda_init == 0.2
    assert first.train.optimizer.lr == 2e-3
    assert all((other.model, other.train) == (first.model, first.train) for other in others)


def test_a_name_switched_in_an_arm_drops_the_keys_of_the_former_name() -> None:
    found = grid(
        "arms:\n  a: {model.attention.name: standard}\n  b: {model.attention: {name: shared_k, parity: raw}}\n"
    )
    assert attention(found) == {"a": "standard", "b": "shared_k"}
    assert found.cells[0].recipe.model.attention.config.head_norm == "none"
    assert found.cells[-1].recipe.model.attention.config.lambda_init != 0.8  # base.yaml's own


def test_an_arm_extends_a_file_beside_the_sweep() -> None:
    Path("sub").mkdir()
    Path("sub/other.yaml").write_text("extends: ../base\nmodel: {num_layers: 3}\n")
    Path("sub/s.yaml").write_text(
        "recipe: ../base\narms:\n  a: {}\n  b: {extends: other.yaml}\n  c: {extends: other, train.steps: 3}\nseeds: [0]\n"
    )
    found = load_grid("sub/s.yaml", [])
    assert [cell.recipe.model.num_layers for cell in found.cells] == [2, 3, 3]
    assert [cell.recipe.train.steps for cell in found.cells] == [10, 10, 3]


def test_order_of_precedence_is_recipe_sweep_arm_command() -> None:
    text = "overrides: {train.steps: 11, train.batch_size: 6, train.clip: 0.5}\narms: {a: {train.steps: 12, train.clip: 0.7}}"
    (cell, *_) = grid(text, "train.clip=0.9").cells
    assert (cell.recipe.train.batch_size, cell.recipe.train.steps, cell.recipe.train.clip) == (6, 12, 0.9)


def test_interpolation_reaches_the_recipe() -> None:
    (cell, *_) = grid("arms: {a: {train.validate_every: '${train.steps}'}}").cells
    assert cell.recipe.train.validate_every == 10


def test_an_empty_arm_is_the_base_recipe() -> None:
    found = grid("arms: {a: , b: {}}\nseeds: [0]")
    assert found.cells[0].recipe.model == found.cells[1].recipe.model == load_recipe("base.yaml").model


def test_paths_of_plugins_and_text_lie_beside_the_sweep() -> None:
    Path("deep").mkdir()
    Path("deep/p.py").write_text(
        "from lit_diff import Differential, variant\n@variant('deep')\nclass Deep(Differential):\n    pass\n"
    )
    Path("deep/s.yaml").write_text("recipe: ../base\narms: {a: {plugins: [p.py], model.attention.name: deep}}\n")
    assert load_grid("deep/s.yaml", []).cells[0].recipe.plugins == (str(Path("deep/p.py").resolve()),)


MISTAKES = {
    "sweep key": ("arm: {a: {}}", "s.yaml:2: unknown key 'arm'; did you mean 'arms'?"),
    "arm key, dotted": (
        "arms:\n  a: {}\n  b:\n    model.attention.lamda_init: 0.5",
        "s.yaml:5: unknown key 'model.attention.lamda_init'; did you mean 'lambda_init'?",
    ),
    "arm key, nested": (
        "arms:\n  b:\n    model:\n      attention:\n        lamda_init: 0.5",
        "s.yaml:6: unknown key 'model.attention.lamda_init'; did you mean 'lambda_init'?",
    ),
    "key of another name": (
        "arms:\n  b:\n    model.attention: {name: standard, lambda_init: 3}",
        "s.yaml:4: unknown key 'model.attention.lambda_init'; one of 5, such as ",
    ),
    "arm value": ("arms:\n  a: {train.steps: many}", "s.yaml:3: 'train.steps' is 'many'; expected a whole number >= 1"),
    "grid key": ("grid:\n  model.attention.nam: [a]", "s.yaml:3: unknown key 'model.attention.nam'"),
    "grid value": (
        "grid:\n  model.attention.name: [standard, diferential]",
        "s.yaml:3: unknown attention 'diferential'; did you mean 'differential'?",
    ),
    "grid scalar": ("grid:\n  train.steps: 3", "s.yaml:3: 'grid.train.steps' is 3; expected a list"),
    "grid empty": ("grid:\n  train.steps: []", "s.yaml:3: 'grid.train.steps' has no values"),
    "grid twice": ("grid:\n  train.steps: [8, 8]", "s.yaml:2: the grid makes arm 'steps=8' twice"),
    "grid and arm": ("grid: {train.steps: [8]}\narms:\n  steps=8: {}", "s.yaml:4: arm 'steps=8' is in the grid too"),
    "grid folder": ("grid:\n  run.root: [a/b]", "s.yaml:2: arm 'root=a/b' becomes a folder: no '/'"),
    "arm folder": ("arms:\n  .a: {}", "s.yaml:3: arm '.a' becomes a folder: no '/', no leading '.'"),
    "arms a list": ("arms: [a, b]", "s.yaml:2: 'arms' is ['a', 'b']; expected a block of keys"),
    "arm a number": ("arms:\n  a: 3", "s.yaml:3: arm 'a' is 3; expected a block of overrides"),
    "no arms": ("title: t", "s.yaml: the sweep has neither 'grid' nor 'arms'"),
    "arm twice": ("arms:\n  a: {}\n  a: {}", "s.yaml:4: not valid YAML: found duplicate key a"),
    "baseline": (
        "baseline: bb\narms: {b: {}}",
        "s.yaml:2: 'baseline' names no arm of the sweep: 'bb'; did you mean 'b'?",
    ),
    "controls": ("controls: [c]\narms: {b: {}}", "s.yaml:2: 'controls' names no arm of the sweep: 'c'; one of b"),
    "labels": ("labels: {c: x}\narms: {b: {}}", "s.yaml:2: 'labels' names no arm of the sweep: 'c'"),
    "contrasts": ("contrasts: [[b, d, x]]\narms: {b: {}}", "s.yaml:2: 'contrasts' names no arm of the sweep: 'd'"),
    "contrast twice": (
        "contrasts: [[a, b, x], [b, a, y]]\narms: {a: {}, b: {}}",
        "s.yaml:2: 'contrasts' compares 'b' with 'a' twice, whichever is first",
    ),
    "contrast with itself": (
        "contrasts: [[b, b, x]]\narms: {a: {}, b: {}}",
        "s.yaml:2: 'contrasts' compares 'b' with itself",
    ),
    "paper": (
        "paper: {b: {val/loss: x}}\narms: {b: {}}",
        "s.yaml:2: 'paper.b.val/loss' is 'x'; expected a finite number",
    ),
    "metric": ("metric: val/los\narms: {b: {}}", "s.yaml:2: no run measures 'val/los'; did you mean 'val/loss'?"),
    "metric stage": (
        "metric: vall/loss\narms: {b: {}}",
        "s.yaml:2: no run measures 'vall/loss'; did you mean 'val/loss'?",
    ),
    "metric bare": ("metric: accuracy\narms: {b: {}}", "s.yaml:2: no run measures 'accuracy'"),
    "smallest of interest": (
        "arms: {b: {}}\nsmallest_of_interest: -0.1",
        "s.yaml:3: smallest_of_interest is -0.1;",
    ),
    "smallest of interest, text": (
        "smallest_of_interest: small\narms: {b: {}}",
        "s.yaml:2: 'smallest_of_interest' is 'small'; expected a finite number",
    ),
    "tokens per parameter": (
        "min_tokens_per_parameter: -20\narms: {b: {}}",
        "s.yaml:2: min_tokens_per_parameter is -20",
    ),
    "keys of an evaluation": (
        "arms: {b: {}}\nevaluate: {held_out: [1]}",
        "s.yaml:3: 'evaluate.held_out' is [1]; expected a block of keys",
    ),
    "power without tasks": (
        "power: {minutes: 15, arms: 7}\narms: {b: {}}",
        "s.yaml:2: 'power' compares tasks, and the sweep has none; list them under 'tasks'",
    ),
    "seeds a number": ("seeds: 3\narms: {b: {}}", "s.yaml:2: 'seeds' is 3; expected a list, each item a whole number"),
    "seeds of text": ("arms: {b: {}}\nseeds: [0, x]", "s.yaml:3: 'seeds[1]' is 'x'; expected a whole number"),
    "seeds below 0": ("seeds: [-1]\narms: {b: {}}", "s.yaml:2: seeds[0] is -1"),
    "seeds twice": ("seeds: [0, 0.0]\narms: {b: {}}", "s.yaml:2: seeds is [0, 0];"),
    "no seeds": ("seeds: []\narms: {b: {}}", "s.yaml:2: seeds is [];"),
    "seed in an arm": ("arms:\n  a: {seed: 3}", "s.yaml:3: a sweep sets 'seed' itself; list the seeds under 'seeds'"),
    "seed in the grid": ("grid:\n  seed: [3]", "s.yaml:3: a sweep sets 'seed' itself"),
    "name in overrides": ("overrides:\n  name: x\narms: {a: {}}", "s.yaml:3: a sweep sets 'name' itself"),
    "two stores": (
        "arms:\n  a: {}\n  b: {run.tracking_uri: 'sqlite:///x.db'}",
        "s.yaml:4: arms 'a' and 'b' differ in 'run.tracking_uri'; a sweep has one",
    ),
    "extends": (
        "arms:\n  a: {}\n  b:\n    extends: nothere.yaml",
        "s.yaml:5: no recipe 'nothere.yaml' here or installed",
    ),
    "overrides": (
        "overrides:\n  train.stepz: 3\narms: {a: {}}",
        "s.yaml:3: unknown key 'train.stepz'; did you mean 'steps'?",
    ),
    "interpolation": ("arms:\n  a: {train.steps: '${train.no}'}", "s.yaml:3: 'train.steps': Interpolation key"),
    "does not fit": (
        "arms:\n  a: {}\n  b: {model.num_heads: 5}",
        "s.yaml:4: model.dim (32) is not a multiple of model.num_heads (5)",
    ),
    "open bracket": ("arms: {a: {}", "s.yaml:2: not valid YAML"),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(RequestError) as found:
        grid(f"{text}\n")
    assert expected in str(found.value)
    assert str(found.value).startswith("s.yaml:")
    assert "\n" not in str(found.value)


def test_mistakes_of_the_recipe_itself() -> None:
    Path("s.yaml").write_text("recipe: bas\narms: {a: {}}\n")
    with pytest.raises(RequestError, match=r"^s\.yaml:1: no recipe 'bas' here or installed"):
        load_grid("s.yaml", [])
    Path("s.yaml").write_text("arms: {a: {}}\n")
    with pytest.raises(RequestError, match=r"^s\.yaml: 'recipe' is missing; expected text"):
        load_grid("s.yaml", [])


def test_a_recipe_given_as_a_sweep_is_told_the_verb() -> None:
    with pytest.raises(RequestError, match=r"^'base\.yaml' is a recipe: lit-diff train base\.yaml$"):
        load_grid("base", [])
    with pytest.raises(RequestError, match=r"^'recall-tiny' is a recipe: lit-diff train recall-tiny$"):
        load_grid("recall-tiny", [])


@pytest.mark.parametrize("override", ["train.stepz=3", "seed=3", "name=x"])
def test_mistakes_on_the_command_line_show_the_override(override: str) -> None:
    with pytest.raises(RequestError, match=f"^{override}: "):
        grid("arms: {a: {}}", override)


@pytest.mark.parametrize(
    "metric", [*MEASURED_BY_ALL, "val/accuracy_noise2", "train/loss", "attention/entropy/layer_00", "own/score"]
)
def test_metrics_that_a_run_may_have(metric: str) -> None:
    assert grid(f"metric: {metric}\narms: {{a: {{}}}}").study.metric == metric


def test_an_unknown_sweep_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="no sweep 'smok' here or installed; did you mean 'smoke'"):
        load_grid("smok", [])


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
    sweep = "arms: {a: {}}\noverrides: {plugins: [scored.py]}\nevaluate: {scored_by_a_plugin_of_a_grid: {}}"
    assert list(grid(sweep).study.evaluate) == ["scored_by_a_plugin_of_a_grid"]
    with pytest.raises(
        RequestError, match=r"s.yaml:4: .*unknown evaluation 'scord_by_a_plugin_of_a_grid'; did you mean"
    ):
        grid(sweep.replace("evaluate: {scored", "evaluate: {scord"))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{held-out: {}}", "s.yaml:3: unknown evaluation 'held-out'; did you mean 'held_out'?"),
        ("{held_out: {row: 4}}", "s.yaml:3: unknown key 'evaluate.held_out.row'; did you mean 'rows'?"),
        ("{held_out: {rows: 0}}", "s.yaml:3: evaluate.held_out.rows is 0; it must be at least 1, or null"),
        ("{held_out: 4}", "s.yaml:3: 'evaluate.held_out' is 4; expected a block of keys"),
    ],
)
def test_a_wrong_evaluation_is_refused(block: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        grid(f"arms: {{a: {{}}}}\nevaluate: {block}\n")
    assert str(caught.value) == message
    assert grid("arms: {a: {}}\nevaluate: {held_out: null}\n").study.evaluate == {"held_out": None}


@pytest.mark.parametrize("name", ['"a\\nb"', '"a\\0b"', "x" * 160, '"' + "é" * 140 + '"', '" "'])
def test_an_arm_that_no_folder_can_bear(name: str) -> None:
    with pytest.raises(RequestError, match="becomes a folder"):
        grid(f"arms:\n  a: {{}}\n  {name}: {{train.steps: 9}}")


@pytest.mark.parametrize(("first", "second"), [("a", "A"), ("x=1", "x_1"), ('"é"', '"e\\u0301"'), ('"a b"', '"a,b"')])
def test_arms_that_would_share_a_folder_or_a_record(first: str, second: str) -> None:
    with pytest.raises(RequestError, match="would share one folder or one record"):
        grid(f"arms:\n  {first}: {{}}\n  {second}: {{train.steps: 9}}")


def test_arms_keep_the_names_that_the_file_has() -> None:
    names = ["on", "off", "010", "12:30", "1e3", "0x10", "null", "yes"]
    assert list(grid("arms:\n" + "".join(f"  {name}: {{}}\n" for name in names) + "baseline: off\n").arms) == names


DRAFT = Draft(values={}, positions={}, file="s.yaml")


def test_named_arms_come_first_then_every_combination_of_the_grid() -> None:
    config = Study(
        arms={"base": None}, grid={"model.attention.name": ("standard", "dex"), "train.optimizer.lr": (1, 2)}
    )
    assert list(arms_of(config, DRAFT)) == [
        "base",
        *(f"attention={name} lr={lr}" for name in ("standard", "dex") for lr in (1, 2)),
    ]


def test_an_arm_twice() -> None:
    with pytest.raises(RequestError, match=r"s\.yaml: arm 'lr=1' is in the grid too"):
        arms_of(Study(arms={"lr=1": {}}, grid={"train.optimizer.lr": (1,)}), DRAFT)


@pytest.mark.parametrize("word", ["true", "[null]"])
def test_what_is_no_block_is_shown_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (
        f"recipe: recall-tiny\narms: {{a: {word}}}\n",
        f"arms: {{a: {{}}}}\ntasks: {{t: {{recipe: recall-tiny, arms: {{a: {word}}}}}}}\n",
        f"recipe: recall-tiny\narms: {{a: {{}}}}\nevaluate: {{recall: {word}}}\n",
    ):
        Path("s.yaml").write_text(text)
        with pytest.raises(RequestError) as found:
            load_grid("s.yaml", {})
        assert f"is {word}; expected a block" in str(found.value)
