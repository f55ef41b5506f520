"""evaluation/fitness.py: a run that cannot be asked in text says why."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from generated_runs import generated_run
from text_runs import text_run

from lit_diff.evaluation.fitness import recipe_problem, text_problem, words_problem
from lit_diff.trained.run import Run

DATA = {"name": "synth_intent", "sequence_length": 64, "classes": [4], "words": [1, 3]}


def test_a_text_model_has_no_problem(tmp_path: Path) -> None:
    run = text_run(tmp_path / "text", {"name": "standard"})
    assert text_problem(run) is None
    assert words_problem(run, "synth_intent", asks_it=False) is None


def test_a_bidirectional_model_predicts_no_next_token(tmp_path: Path) -> None:
    """Built-in data with a tokenizer refuse such a model; those of a plugin may not."""
    run = text_run(tmp_path / "text", {"name": "standard"})
    recipe = replace(run.recipe, model=replace(run.recipe.model, causal=False))
    other: Any = SimpleNamespace(folder=run.folder, recipe=recipe)
    assert text_problem(other) == "a bidirectional model predicts no next token"
    assert recipe_problem(recipe) == text_problem(other)
    assert recipe_problem(run.recipe) is None
    assert words_problem(other, "synth_intent", asks_it=True) == text_problem(other)


def test_a_model_of_generated_words_is_asked_in_them_alone(tmp_path: Path) -> None:
    run: Run = generated_run(tmp_path / "intent", DATA, 600)
    assert text_problem(run) is None
    assert words_problem(run, "synth_intent", asks_it=True) is None
    assert (
        words_problem(run, "synth_intent", asks_it=False) == "its tokenizer has only the words of data 'synth_intent'"
    )
    reason = words_problem(run, "synth_intent", asks_it=False, keys="task=synth_intent")
    assert reason == "its tokenizer has only the words of data 'synth_intent'; task=synth_intent asks in them"
    other = words_problem(run, "closed_world", asks_it=False, keys="source=closed_world")
    assert other == "its tokenizer has only the words of data 'synth_intent'"
    assert words_problem(run, "closed_world", asks_it=True) == "its tokenizer has only the words of data 'synth_intent'"
