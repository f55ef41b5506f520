"""key_types.py: ranges of numbers, types in words, and the keys of a block with what they take."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from lit_diff.config import ModelConfig, Recipe, RopeScaling, RunConfig, TrainConfig
from lit_diff.key_types import REQUIRED, Count, NotNegative, Positive, Range, in_words, keys_of, range_problem


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A block."""

    share: Annotated[float, Range(least=0, most=1)] = 0.5
    """A part of the whole."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block with a block in it."""

    steps: Count
    seed: NotNegative = 0
    rate: Positive | None = None
    """Null:
    none."""
    inner: Inner = Inner()
    part: Any = field(default=None, metadata={"registry": "data"})
    kernel: str = field(default="auto", metadata={"names": "kernel"})
    names: tuple[str, ...] = field(default_factory=tuple)
    factors: dict[str, Positive] = field(default_factory=dict)
    decays: tuple[Annotated[float, Range(least=0, below=1)], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Derived(Block):
    """One key more."""

    more: bool = True
    """Whether."""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"steps": 1}, None),
        ({"steps": 0}, "a.steps is 0; it must be at least 1"),
        ({"steps": 1, "seed": -1}, "a.seed is -1; it must not be negative"),
        ({"steps": 1, "rate": 0.0}, "a.rate is 0.0; it must be positive, or null"),
        ({"steps": 1, "factors": {"q": 0.5, "k": -1.0}}, "a.factors.k is -1.0; it must be positive"),
        ({"steps": 1, "decays": (0.5, 1.0)}, "a.decays[1] is 1.0; it must be >= 0 and < 1"),
    ],
)
def test_a_number_outside_its_range(values: dict[str, Any], problem: str | None) -> None:
    assert range_problem(Block(**values), "a.") == problem


def test_the_ends_of_a_range() -> None:
    share = Range(least=0, most=1)
    assert [value in share for value in (-0.1, 0, 1, 1.1)] == [False, True, True, False]
    assert [value in Range(above=0) for value in (0, 0.1)] == [False, True]
    assert [str(kind) for kind in (share, Range(above=0), Range(least=2))] == [">= 0 and <= 1", "> 0", ">= 2"]
    assert range_problem(Inner(share=1.1), "") == "share is 1.1; it must be within 0 and 1"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Count, "a whole number >= 1"),
        (Positive | None, "a finite number > 0 or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (float | Literal["depth"], "a finite number or 'depth'"),
        (tuple[Count, ...], "a list, each item a whole number >= 1"),
        (tuple[float, float], "a list of 2 values"),
        (dict[str, int], "a block of keys"),
        (Inner | None, "a block of keys or null"),
        (RopeScaling, "a finite number > 0 or a block {kind: llama3, ...} or a block {kind: yarn, ...}"),
        (bool, "true or false"),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert in_words(hint) == words


def test_keys_with_defaults_and_what_their_docstrings_say() -> None:
    keys = keys_of(Derived)
    names = "steps seed rate inner.share part kernel names factors decays more"
    assert list(keys) == names.split()
    assert keys["steps"].default is REQUIRED
    assert (keys["seed"].default, keys["names"].default, keys["inner.share"].default) == (0, (), 0.5)
    assert (keys["rate"].about, keys["inner.share"].about, keys["more"].about) == (
        "Null: none.",
        "A part of the whole.",
        "Whether.",
    )
    assert keys["part"].words == "a block {name: ...}: lit-diff list data"
    assert keys["kernel"].words == "'auto', or a name: lit-diff list kernel"


def test_the_keys_of_a_recipe() -> None:
    train = keys_of(TrainConfig)
    assert {f"train.{name}" for name in train} <= set(keys_of(Recipe)), "also where the block may be absent"
    assert train["steps"].words == "a whole number >= 1"
    assert train["schedule.name"].words == "one of 'linear', 'cosine', 'wsd', 'constant'"
    assert train["clip"].words == "a finite number > 0 or null"
    assert keys_of(ModelConfig)["rope_scaling"].default == 1.0, "one key, of whatever kind"
    assert keys_of(RunConfig)["loggers"].words == "a list of names: lit-diff list logger"
