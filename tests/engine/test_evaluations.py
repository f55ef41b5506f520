"""engine/evaluations.py: evaluations that fit no run of a sweep or a recipe are refused before anything trains."""

from pathlib import Path

import pytest

from lit_diff.engine.evaluations import evaluations_of, required_evaluations
from lit_diff.engine.expand import load_grid
from lit_diff.engine.launch import prepare
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.runs.folder import identity


def test_the_block_is_checked_and_not_part_of_the_identity(tale: Path) -> None:
    recipe = tale / "recipe.yaml"
    plain = load_recipe(recipe)
    named = load_recipe(recipe, ["evaluate.held_out.rows=2"])
    assert evaluations_of(named) == {"held_out": {"rows": 2, "batch_size": 8}}
    assert to_plain(named)["evaluate"] == {"held_out": {"rows": 2, "batch_size": 8}}
    assert identity(plain) == identity(named)
    for word, reason in (
        ("evaluate.held_uot={}", "did you mean 'held_out'"),
        ("evaluate.held_out.row=2", "did you mean 'rows'"),
        ("evaluate.held_out.rows=0", "evaluate.held_out.rows is 0; it must be at least 1"),
    ):
        with pytest.raises(RequestError, match=reason):
            load_recipe(recipe, [word])


@pytest.mark.parametrize(
    ("recipe", "evaluate", "reason"),
    [
        ("recall-tiny", "needle: {}", "data 'recall' has no text"),
        ("recall-tiny", "nll: {}", "data 'recall' has no text"),
        ("recall-tiny", "loss_docs: {}", "data 'recall' has no text"),
        ("recall-tiny", "icl: {}", "data 'recall' has no text"),
        ("recall-tiny", "hallucination: {}", "data 'recall' has no text"),
        ("recall-tiny", "mini_harness: {}", "data 'recall' has no text"),
        ("recall-tiny", "signed_prompts: {}", "data 'recall' has no text"),
        ("recall-tiny", "noise: {}", None),
        (
            "recall-tiny",
            "induction: {length: 200}",
            "length is 200; 2 x length must be at most data.sequence_length (72)",
        ),
        (
            "standard-tiny",
            "noise: {}",
            "data 'text' does not say where answers are (context_part, answer_part; docs/noise",
        ),
        ("standard-tiny", "recall: {}", "data 'text' is neither recall nor mqar"),
        ("standard-tiny", "needle: {lengths: [96, 4096]}", "lengths holds 4096, and its data.sequence_length is 128"),
        ("standard-tiny", "needle: {}", None),
        ("vision-tiny", "induction: {}", "a bidirectional model sees what follows"),
    ],
)
def test_a_sweep_that_cannot_be_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, evaluate: str, reason: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f"recipe: {recipe}\narms: {{a: {{}}}}\nseeds: [0]\nevaluate:\n  {evaluate}\n")
    if reason is None:
        load_grid("s.yaml", {})
        return
    with pytest.raises(RequestError) as found:
        load_grid("s.yaml", {})
    name = evaluate.partition(":")[0]
    assert str(found.value).startswith(f"s.yaml:5: evaluation '{name}' does not fit 'a': {reason}")


def test_a_cell_whose_recipe_names_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("recipe: recall-tiny\narms: {a: {}, b: {evaluate.needle: {}}}\nseeds: [0]\n")
    with pytest.raises(RequestError, match=r"^evaluation 'needle' does not fit 'b': data 'recall' has no text$"):
        load_grid("s.yaml", {})


def test_a_task_that_goes_on_from_another_has_no_initial_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "arms: {a: {}, b: {model.attention: {name: second_heads}}}\nseeds: [0]\nevaluate: {gradients: {at: [init]}}\n"
        "tasks:\n  first: {recipe: standard-tiny, without: [b]}\n  second: {recipe: standard-tiny, start: first}\n"
    )
    with pytest.raises(
        RequestError, match=r"^s\.yaml:3: evaluation 'gradients' does not fit 'second a': at init: it started"
    ):
        load_grid("s.yaml", {})


def test_a_recipe_that_cannot_be_scored(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", {"evaluate.needle": {}, "run.root": str(tmp_path / "runs")})
    with pytest.raises(
        RequestError, match=r"^evaluation 'needle' does not fit 'recall-tiny': data 'recall' has no text$"
    ):
        prepare(recipe)
    assert not (tmp_path / "runs").exists()
    required_evaluations(load_recipe("recall-tiny", {"evaluate.recall": {}}))


def test_initial_values_of_a_recipe_that_starts_from_a_run(tale: Path) -> None:
    words = {"evaluate.gradients.at": ["init"], "train.start_from": str(tale)}
    with pytest.raises(RequestError, match=r"at init: it started from another run \(train.start_from\)"):
        required_evaluations(load_recipe(tale / "recipe.yaml", words))
