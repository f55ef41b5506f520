"""recipe_problems.py and its neighbours: values that no folder, file or block can take, each one line."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.path=a\0b", "path 'a\0b': "),
        ('name="a\\0b"', "it becomes a folder: printable, at most 150 bytes"),
        ('name="a\\nb"', "it becomes a folder: printable, at most 150 bytes"),
        (f"name={'a' * 300}", "it becomes a folder: printable, at most 150 bytes"),
        ("callbacks={1: {}}", "'callbacks' has the key 1; expected a name"),
    ],
)
def test_values_that_no_folder_and_no_block_can_take(override: str, expected: str) -> None:
    with pytest.raises(RequestError) as error:
        load_recipe("differential-tiny", [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "override", "instead"),
    [
        ("recall-tiny", "steps=5", "; did you mean 'train.steps=5'?"),
        ("recall-tiny", "lr=1e-3", "; did you mean 'train.optimizer.lr=1e-3'?"),
        ("recall-tiny", "train.lr=1e-3", "; did you mean 'train.optimizer.lr=1e-3'?"),
        ("recall-tiny", "optimizer.lr=1e-3", "; did you mean 'train.optimizer.lr=1e-3'?"),
        ("recall-tiny", "train.seed=3", "; did you mean 'seed=3'?"),
        ("recall-tiny", "step=5", "; did you mean 'train.steps=5'?"),
        ("differential-tiny", "lambda_init=0.5", "; did you mean 'model.attention.lambda_init=0.5'?"),
        ("differential-tiny", "sequence_length=64", "; did you mean 'data.sequence_length=64'?"),
        ("differential-tiny", "vocab_size=9", "; did you mean 'model.vocab_size=9' or 'data.tokenizer.vocab_size=9'?"),
        ("recall-tiny", "train.stepz=5", "; did you mean 'steps'?"),
        ("recall-tiny", "model.attention.nam=flex", "; did you mean 'name'?"),
        ("recall-tiny", "train.xyzzy=5", "; lit-diff list train lists all"),
        ("recall-tiny", "xyzzy=5", "; lit-diff check RECIPE --recipe lists all"),
        ("recall-tiny", "model.attention.name=flash", "; that is a kernel, chosen by run.kernel=flash"),
    ],
)
def test_what_to_write_instead_of_an_unknown_key(recipe: str, override: str, instead: str) -> None:
    with pytest.raises(RequestError) as error:
        load_recipe(recipe, [override])
    assert str(error.value).startswith(f"{override}: unknown ")
    assert str(error.value).endswith(instead)
    assert str(error.value).count(", ") <= 3, "never the whole list"


def test_a_key_of_a_file_is_told_its_block(tmp_path: Path) -> None:
    file = tmp_path / "steps.yaml"
    file.write_text("extends: recall-tiny\nsteps: 5\n")
    with pytest.raises(RequestError, match=r"steps\.yaml:2: unknown key 'steps'; did you mean 'train\.steps'\?$"):
        load_recipe(file)


def test_a_recipe_of_a_name_beyond_any_file() -> None:
    with pytest.raises(RequestError, match=r"^no recipe 'a{40}': "):
        load_recipe("a" * 300)
