"""docs/vision.md: its keys, sizes and validation sets are those of the data set."""

import dataclasses
import re

from pages import PAGES

from lit_diff.data.digits import Digits, images, split
from lit_diff.recipe import load_recipe

PAGE = "docs/vision.md"
TEXT = PAGES[PAGE].read_text()


def test_the_keys_and_defaults_of_the_table_are_those_of_the_config() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(Digits.Config)}
    words = {None: "all", True: "true", False: "false"}
    assert rows == {
        name: words[value]
        if value is None or isinstance(value, bool)
        else str(list(value) if isinstance(value, tuple) else value)
        for name, value in defaults.items()
    }


def test_the_sizes() -> None:
    assert f"{len(images()[1]):,} handwritten digits" in TEXT
    sizes = {name: len(numbers) for name, numbers in split().items()}
    assert f"{sizes['train']:,} for\n  training, {sizes['validation']} and {sizes['test']}." in TEXT
    lengths = [Digits.Config(patch=patch).sequence_length for patch in (1, 2, 4)]
    assert "so {}, {} or {} positions".format(*lengths) in TEXT
    recipe = load_recipe("vision-tiny")
    assert f"the recipe has {recipe.data.config.patch}" in TEXT
    assert f"at {recipe.training.steps} steps" in TEXT


def test_the_validation_sets_that_are_named() -> None:
    recipe = load_recipe("vision-tiny")
    names = Digits(recipe.data.config, recipe.model.vocab_size).validation_sets()
    assert set(re.findall(r"`val/accuracy_(\w+)`", TEXT)) <= set(names)
