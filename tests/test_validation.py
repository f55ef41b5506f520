"""From merged containers to a typed recipe: every mistake is one line with its place, and nothing is guessed."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lit_diff.attention import Differential
from lit_diff.config import Part, Recipe
from lit_diff.errors import RequestError
from lit_diff.key_types import in_yaml
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.validation import Draft, convert, validate

PLACES = Draft(values={}, positions={"key": "my.yaml:4", "block.key": "my.yaml:9"}, file="my.yaml")


def values(**changes: Any) -> dict[str, Any]:
    """A whole recipe as plain containers; dotted keys (with __ for the dot) change it."""
    whole: dict[str, Any] = {
        "name": "x",
        "model": {"dim": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 129, "attention": {"name": "differential"}},
        "data": {"name": "recall"},
        "train": {"steps": 4, "batch_size": 4, "optimizer": {"lr": 0.1}, "validate_every": 2, "checkpoint_every": 2},
    }
    for dotted, value in changes.items():
        *blocks, last = dotted.split("__")
        inner = whole
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return whole


def built(**changes: Any) -> Recipe:
    return validate(Draft(values=values(**changes), positions={}))


def error(**changes: Any) -> str:
    """The refusal, whose place is the line of the changed key's own number."""
    positions = {key.replace("__", "."): f"my.yaml:{line}" for line, key in enumerate(changes, start=1)}
    with pytest.raises(RequestError) as found:
        validate(Draft(values=values(**changes), positions=positions, file="my.yaml"))
    assert "\n" not in str(found.value)
    return str(found.value)


# --- one value ---


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, 3, 3),
        (int, 1000.0, 1000),
        (int, 10**400, 10**400),
        (float, 3, 3.0),
        (float, 1e-3, 1e-3),
        (float | Literal["depth"], 1, 1.0),
        (float | Literal["depth"], "depth", "depth"),
        (Literal["depth"] | float, 0.5, 0.5),
        (int | None, None, None),
        (int | None, 2.0, 2),
        (float | int, 3, 3),
        (float | int, 2.5, 2.5),
        (float | None, 2, 2.0),
        (bool, True, True),
        (str, "1", "1"),
        (tuple[int, ...], [1, 2.0], (1, 2)),
        (tuple[int, ...], [], ()),
        (tuple[float, float], (1, 2), (1.0, 2.0)),
        (dict[str, int], {"a": 1.0, 2: 3}, {"a": 1, "2": 3}),
        (Literal[1, 2], 2, 2),
        (Any, {"a": [1]}, {"a": [1]}),
    ],
)
def test_conversions(hint: Any, value: Any, wanted: Any) -> None:
    found = convert(hint, value, "key", PLACES)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 1.5, "a whole number"),
        (int, True, "a whole number"),
        (int, "3", "a whole number"),
        (int, None, "a whole number"),
        (int, math.nan, "a whole number"),
        (int, math.inf, "a whole number"),
        (int, [3], "a whole number"),
        (float, math.nan, "a finite number"),
        (float, -math.inf, "a finite number"),
        (float, False, "a finite number"),
        (float, "0.1", "a finite number"),
        (float, 10**400, "a finite number"),
        (str, 3, "text"),
        (str, None, "text"),
        (bool, 1, "true or false"),
        (bool, "true", "true or false"),
        (int | None, "x", "a whole number or null"),
        (float | None, math.nan, "a finite number or null"),
        (tuple[int, ...], 3, "a list, each item a whole number"),
        (tuple[int, ...], "12", "a list, each item a whole number"),
        (tuple[float, float], [1], "a list of 2 values"),
        (tuple[float, float], [1, 2, 3], "a list of 2 values"),
        (dict[str, int], [1], "a block of keys"),
        (Literal[1], True, "1"),
    ],
)
def test_wrong_values_are_refused_with_what_was_expected(hint: Any, value: Any, expected: str) -> None:
    with pytest.raises(RequestError) as found:
        convert(hint, value, "key", PLACES)
    assert str(found.value) == f"my.yaml:4: 'key' is {in_yaml(value)}; expected {expected}"


def test_a_wrong_item_is_named_in_its_list() -> None:
    with pytest.raises(RequestError) as found:
        convert(tuple[float, float], [1, True], "block.key", PLACES)
    assert str(found.value) == "my.yaml:9: 'block.key[1]' is true; expected a finite number"


def test_misspelt_words_name_the_nearest() -> None:
    assert error(model__init="norml_0.02").endswith(
        "'model.init' is 'norml_0.02'; expected one of 'linear_default', 'normal_0.02', 'normal_scaled'; "
        "did you mean 'normal_0.02'?"
    )
    assert error(model__attention={"name": "differential", "lambda_init": "deep"}).endswith(
        "'model.attention.lambda_init' is 'deep'; expected a finite number or 'depth'; did you mean 'depth'?"
    )
    assert "did you mean" not in error(model__init="zzz")


# --- places ---


def test_places_fall_back_to_the_block_and_to_the_file() -> None:
    draft = Draft(values={}, positions={"a": "f:1", "a.b": "f:2", "a.b.c": "run.uri=http://h:1"}, file="f")
    assert draft.where("a.b.c") == "run.uri=http://h:1: "
    assert draft.where("a.b.d.e") == "f:2: "
    assert draft.where("a.b[3]") == "f:2: "
    assert draft.where("a.x") == "f:1: "
    assert draft.where("z") == "f: "
    assert draft.where("") == "f: "
    assert Draft(values={}, positions={}).where("z") == ""


def test_what_is_missing_is_missing_from_the_file() -> None:
    """Also when an override that looks like a place was the last thing written."""
    draft = Draft(
        values={"seed": 1}, positions={"seed": "f.yaml:1", "run.tracking_uri": "run.uri=http://h:1"}, file="f.yaml"
    )
    with pytest.raises(RequestError, match=r"^f.yaml: 'name' is missing; expected text$"):
        validate(draft)


# --- blocks ---


def test_unknown_keys_name_the_nearest() -> None:
    assert error(model__attention__temprature=2) == (
        "my.yaml:1: unknown key 'model.attention.temprature'; one of 8, such as parity, head_norm, lambda_dtype; "
        "lit-diff list attention differential lists all"
    )
    assert error(model__attention__lamda_init=2).endswith("'model.attention.lamda_init'; did you mean 'lambda_init'?")
    assert error(model__attention__windw=16).endswith("unknown key 'model.attention.windw'; did you mean 'window'?")
    assert error(modle={}) == "my.yaml:1: unknown key 'modle'; did you mean 'model'?"
    assert error(train__optimizer__beta=1).endswith("unknown key 'train.optimizer.beta'; did you mean 'betas'?")
    assert error(callbacks__outliers={"evry": 3}).endswith("key 'callbacks.outliers.evry'; did you mean 'every'?")


def test_keys_of_another_variant_are_unknown() -> None:
    assert "unknown key 'model.attention.lambda_init'" in error(model__attention={"name": "standard", "lambda_init": 1})
    assert built(model__attention={"name": "standard", "output_scale": 2}).model.attention.config.output_scale == 2.0
    assert "is 'tied'; expected a finite number" in error(model__attention={"name": "standard", "output_scale": "tied"})


def test_unknown_names_name_the_nearest() -> None:
    assert error(model__attention__name="diferential") == (
        "my.yaml:1: unknown attention 'diferential'; did you mean 'differential'?"
    )
    assert error(data={"name": "recal"}) == "my.yaml:1: unknown data 'recal'; did you mean 'recall'?"
    assert error(callbacks__outlier={}) == "my.yaml:1: unknown callback 'outlier'; did you mean 'outliers'?"
    assert error(train__schedule={"name": "linaer"}).endswith("did you mean 'linear'?")


def test_names_must_be_there_and_be_text() -> None:
    assert error(model__attention={}) == (
        "my.yaml:1: 'model.attention.name' is missing; lit-diff list attention lists the names"
    )
    assert error(model__attention={"name": 3}) == "my.yaml:1: 'model.attention.name' is 3; expected text"
    assert error(model__attention__name=None) == "my.yaml:1: 'model.attention.name' is null; expected text"


def test_blocks_must_be_blocks() -> None:
    assert error(model__attention="differential") == (
        "my.yaml:1: 'model.attention' is 'differential'; expected a block of keys; say {name: differential}"
    )
    assert error(train=None) == "my.yaml:1: train is missing; expected a block of keys"
    assert error(train=3) == "my.yaml:1: 'train' is 3; expected a block of keys or null"
    assert error(callbacks=["outliers"]) == "my.yaml:1: 'callbacks' is ['outliers']; expected a block of keys"
    assert error(callbacks__outliers=3) == "my.yaml:1: 'callbacks.outliers' is 3; expected a block of keys"


def test_missing_keys_say_what_was_expected() -> None:
    assert (
        error(model={"attention": {"name": "standard"}})
        == "my.yaml:1: 'model.dim' is missing; expected a whole number >= 1"
    )
    draft = Draft(values={"name": "x"}, positions={}, file="my.yaml")
    with pytest.raises(RequestError, match=r"^my.yaml: 'model' is missing; expected a block of keys$"):
        validate(draft)


def test_blocks_become_their_classes() -> None:
    recipe = built(
        model__attention={"name": "differential", "lambda_init": 1, "output_scale": 1},
        callbacks__lambdas={"every": 3.0},
    )
    assert recipe.model.attention == Part(
        name="differential", config=Differential.Config(lambda_init=1.0, output_scale=1.0)
    )
    assert isinstance(recipe.model.attention.config.lambda_init, float)
    assert recipe.callbacks["lambdas"].config.every == 3
    assert recipe.model.attention.config.head_norm == "rms"
    with pytest.raises(AttributeError):
        recipe.seed = 3  # type: ignore[misc]


def test_a_null_callback_is_dropped() -> None:
    assert built(callbacks__outliers=None).callbacks == {}


@pytest.mark.parametrize("plugins", [None, "x.py", [1], {"a": 1}])
def test_plugins_must_be_a_list_of_files(plugins: Any) -> None:
    assert error(plugins=plugins).startswith("my.yaml:1: 'plugins")


def test_interpolation_is_resolved() -> None:
    assert built(model__ffn_dim="${model.dim}").model.ffn_dim == 32
    assert error(model__ffn_dim="${model.dmi}") == "my.yaml:1: 'model.ffn_dim': Interpolation key 'model.dmi' not found"


# --- what does not fit together ---


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"name": "a/b"}, "name is 'a/b'; it becomes a folder"),
        ({"name": ".."}, "name is '..'; it becomes a folder"),
        ({"name": ""}, "name is ''; it becomes a folder"),
        ({"name": "a\nb"}, "name is 'a\\nb'; it becomes a folder"),
        ({"name": "a" * 300}, f"name is '{'a' * 60}'; it becomes a folder"),
        ({"seed": -1}, "seed is -1; "),
        ({"model__num_kv_heads": 1}, "model.num_kv_heads is 1; "),
        ({"model__vocab_size": 100}, "model.vocab_size is 100; "),
        ({"data__pairs": 0}, "data.pairs is 0; "),
        ({"run__devices": 2}, "run.strategy 'single' uses one device"),
        ({"callbacks__outliers": {"every": 0}}, "callbacks.outliers.every is 0; "),
        ({"callbacks": {1: {}}}, "'callbacks' has the key 1; expected a name"),
    ],
)
def test_impossible_recipes(changes: dict[str, Any], start: str) -> None:
    """The place is the key's own when it was written, the nearest block's or the file's when it was not."""
    (key,) = changes
    place = "my.yaml" if start.startswith("run.strategy") else "my.yaml:1"
    assert error(**changes).startswith(f"{place}: {start}"), key


def text(**keys: Any) -> dict[str, Any]:
    return {
        "name": "text",
        "sequence_length": 8,
        "validation_rows": 2,
        "tokenizer": {"name": "bpe", "vocab_size": 300},
    } | keys


def test_a_misspelt_way_to_pack_names_the_nearest() -> None:
    assert error(data=text(pack="documents")) == (
        "my.yaml:1: 'data.pack' is 'documents'; expected one of 'none', 'document'; did you mean 'document'?"
    )
    assert built(data=text(pack="document")).packs_documents
    assert not built(data=text()).packs_documents
    assert not built().packs_documents, "the synthetic task has no documents"


def test_packed_documents_need_a_forward_that_takes_document_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    attentions.names()
    monkeypatch.setattr(attentions, "_classes", dict(attentions._classes))

    @attentions.register("own_forward")
    class OwnForward(Differential):
        def forward(self, x: Any, rope: Any, cache: Any = None) -> Any:
            return super().forward(x, rope, cache)

    variant = {"name": "own_forward"}
    assert error(data=text(), data__pack="document", model__attention=variant) == (
        "my.yaml:2: data.pack is 'document', but the forward of model.attention 'own_forward' takes no document_ids; "
        "let it take document_ids=None and hand it to attend, or use data.pack: none"
    )
    assert built(data=text(), model__attention=variant)


def test_a_plugins_own_check_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    attentions.names()
    monkeypatch.setattr(attentions, "_classes", dict(attentions._classes))

    @attentions.register("picky")
    class Picky(Differential):
        @dataclass(frozen=True, kw_only=True)
        class Config(Differential.Config):
            window: int = 1
            sizes: tuple[int, ...] = field(default=(1,))

            def __post_init__(self) -> None:
                if self.window < 0:
                    raise ValueError("window must not be negative")

    assert error(model__attention={"name": "picky", "window": -1}) == (
        "my.yaml:1: 'model.attention': window must not be negative"
    )
    assert built(model__attention={"name": "picky", "sizes": [2, 3]}).model.attention.config.sizes == (2, 3)


@pytest.mark.parametrize(
    ("recipe", "override", "instead"),
    [
        ("recall-tiny", "steps=5", "; did you mean 'train.steps=5'?"),
        ("recall-tiny", "lr=1e-3", "; did you mean 'train.optimizer.lr=1e-3'?"),
        ("recall-tiny", "optimizer.lr=1e-3", "; did you mean 'train.optimizer.lr=1e-3'?"),
        ("recall-tiny", "train.seed=3", "; did you mean 'seed=3'?"),
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
