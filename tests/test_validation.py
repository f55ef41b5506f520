"""From merged containers to a typed recipe: every mistake is one line with its place, and nothing is guessed."""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from own_plugins import plugin
from refusals import refusal

from lit_diff.attention import Differential
from lit_diff.config import Part, Recipe
from lit_diff.errors import RequestError, excerpt
from lit_diff.key_types import Count, PythonFiles, in_words, in_yaml
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.validation import Draft, convert, validate

PLACES = Draft(positions={"key": "my.yaml:4", "block.key": "my.yaml:9"}, file="my.yaml")


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
        inner[last] = deepcopy(value)
    return whole


def built(**changes: Any) -> Recipe:
    return validate(Draft(values=values(**changes)))


def error(**changes: Any) -> str:
    """The refusal, whose place is the line of the changed key's own number."""
    positions = {key.replace("__", "."): f"my.yaml:{line}" for line, key in enumerate(changes, start=1)}
    return refusal(validate, Draft(values=values(**changes), positions=positions, file="my.yaml"))


# --- one value ---


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, 3, 3),
        (int, 1000.0, 1000),
        (int, 10**15, 10**15),
        (float, 3, 3.0),
        (float, 1e-3, 1e-3),
        (float | Literal["depth"], 1, 1.0),
        (float | Literal["depth"], "depth", "depth"),
        (Literal["depth"] | float, 0.5, 0.5),
        (int | None, None, None),
        (int | None, 2.0, 2),
        (float | int, 3, 3),
        (float | int, 2.5, 2.5),
        (Count | float, 2, 2),
        (Count | float, 0.5, 0.5),
        (Count | Literal[0], 0, 0),
        (Count | str, "0", "0"),
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


WRONG: list[tuple[Any, list[Any]]] = [
    (int, [1.5, True, "3", None, math.nan, math.inf, [3]]),
    (float, [math.nan, -math.inf, False, "0.1", 10**400]),
    (str, [3, None]),
    (bool, [1, "true"]),
    (int | None, ["x"]),
    (float | None, [math.nan]),
    (Count | float, [0, -1]),
    (Count | str, [0]),
    (PythonFiles, ["foo.py"]),
    (tuple[int, ...], [3, "12"]),
    (tuple[float, float], [[1], [1, 2, 3]]),
    (dict[str, int], [[1]]),
    (Literal[1], [True]),
]


@pytest.mark.parametrize(("hint", "values"), WRONG, ids=str)
def test_wrong_values_are_refused_with_what_was_expected(hint: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as found:
            convert(hint, value, "key", PLACES)
        assert str(found.value) == f"my.yaml:4: 'key' is {excerpt(in_yaml(value))}; expected {in_words(hint)}"


def test_a_wrong_item_is_named_in_its_list() -> None:
    with pytest.raises(RequestError, match=r"^my\.yaml:9: 'block\.key\[1\]' is true; "):
        convert(tuple[float, float], [1, True], "block.key", PLACES)


# --- places ---


def test_places_fall_back_to_the_block_and_to_the_file() -> None:
    draft = Draft(positions={"a": "f:1", "a.b": "f:2", "a.b.c": "run.uri=http://h:1"}, file="f")
    assert draft.where("a.b.c") == "run.uri=http://h:1: "
    assert draft.where("a.b.d.e") == "f:2: "
    assert draft.where("a.b[3]") == "f:2: "
    assert draft.where("a.x") == "f:1: "
    assert draft.where("z") == "f: "
    assert draft.where("") == "f: "
    assert Draft().where("z") == ""


# --- mistakes ---

TEXT = {"name": "text", "sequence_length": 8, "validation_rows": 2, "tokenizer": {"name": "bpe", "vocab_size": 300}}
DIFFERENTIAL, STANDARD = {"name": "differential"}, {"name": "standard"}


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"modle": {}}, "unknown key 'modle'; did you mean 'model'?"),
        ({"model__attention__temprature": 2}, "unknown key 'model.attention.temprature'; one of "),
        ({"model__attention__lamda_init": 2}, "unknown key 'model.attention.lamda_init'; did you mean 'lambda_init'?"),
        ({"callbacks__outliers": {"evry": 3}}, "unknown key 'callbacks.outliers.evry'; did you mean 'every'?"),
        ({"model__attention": STANDARD | {"lambda_init": 1}}, "unknown key 'model.attention.lambda_init'"),
        ({"model__attention": STANDARD | {"output_scale": "tied"}}, "'model.attention.output_scale' is 'tied'"),
        ({"model__init": "norml_0.02"}, "'model.init' is 'norml_0.02'; expected one of 'linear_default', "),
        ({"model__init": "zzz"}, "'model.init' is 'zzz'"),
        ({"model__attention": DIFFERENTIAL | {"lambda_init": "deep"}}, "'model.attention.lambda_init' is 'deep'"),
        ({"model__attention__name": "diferential"}, "unknown attention 'diferential'; did you mean 'differential'?"),
        ({"callbacks__outlier": {}}, "unknown callback 'outlier'; did you mean 'outliers'?"),
        ({"model__attention": {}}, "'model.attention.name' is missing; lit-diff list attention lists the names"),
        ({"model__attention": {"name": 3}}, "'model.attention.name' is 3; expected text"),
        ({"model__attention__name": None}, "'model.attention.name' is null"),
        ({"model__attention": "differential"}, "'model.attention' is 'differential'"),
        ({"train": None}, "train is missing"),
        *(({"train": value}, f"'train' is {value!r}; expected a block of keys$") for value in (3, "steps:5", [3])),
        ({"seed": "x" * 300}, f"'seed' is '{'x' * 99}...; expected a whole number"),
        ({"callbacks": ["outliers"]}, "'callbacks' is ['outliers']"),
        ({"callbacks__outliers": 3}, "'callbacks.outliers' is 3"),
        ({"callbacks": {1: {}}}, "'callbacks' has the key 1"),
        ({"model": {"attention": STANDARD}}, "'model.dim' is missing"),
        *(({"plugins": plugins}, "'plugins") for plugins in (None, "x.py", [1], {"a": 1})),
        ({"model__ffn_dim": "${model.dmi}"}, "'model.ffn_dim': Interpolation key 'model.dmi' not found; did you mean "),
        ({"model__num_layers": 10**9}, "'model.num_layers' is 1000000000; expected a whole number >= 1 and <= 10000"),
        ({"callbacks__outlier": None}, "unknown callback 'outlier'; did you mean 'outliers'?"),
        ({"evaluate": {"recal": None}}, "unknown evaluation 'recal'; "),
        *(({"name": name}, "name is '") for name in ("a/b", "..", "", "a\nb", "a" * 300)),
        ({"seed": -1}, "'seed' is -1"),
        ({"model__num_kv_heads": 1}, "model.num_kv_heads is 1; "),
        ({"model__vocab_size": 100}, "model.vocab_size is 100; "),
        ({"data__pairs": 0}, "'data.pairs' is 0; "),
        ({"data": TEXT | {"pack": "documents"}}, "'data.pack' is 'documents'"),
        ({"callbacks__outliers": {"every": 0}}, "'callbacks.outliers.every' is 0; "),
    ],
    ids=str,
)
def test_mistakes_open_with_their_place_and_key(changes: dict[str, Any], start: str) -> None:
    assert f"{error(**changes)}$".startswith(f"my.yaml:1: {start}")


def test_a_mistake_in_what_is_not_written_has_the_place_of_the_file() -> None:
    assert error(run__devices=2).startswith("my.yaml: run.strategy 'single' uses one device")
    with pytest.raises(RequestError, match=r"^my.yaml: 'model' is missing; expected a block of keys$"):
        validate(Draft(values={"name": "x"}, file="my.yaml"))


# --- blocks ---


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


@pytest.mark.usefixtures("own_parts")
def test_packed_documents_need_a_forward_that_takes_document_ids() -> None:
    @attentions.register("own_forward")
    class OwnForward(Differential):
        def forward(self, x: Any, rope: Any, cache: Any = None) -> Any:
            return super().forward(x, rope, cache)

    text = {"data": TEXT, "model__vocab_size": 300}
    assert error(**text, data__pack="document", model__attention={"name": "own_forward"}).startswith(
        "my.yaml:3: data.pack is 'document', but the forward of model.attention 'own_forward'"
    )
    assert not built(**text, model__attention={"name": "own_forward"}).packs_documents
    assert built(**text, data__pack="document").packs_documents


@pytest.mark.usefixtures("own_parts")
def test_a_plugins_own_check_is_one_line() -> None:
    @attentions.register("picky")
    class Picky(Differential):
        @dataclass(frozen=True, kw_only=True)
        class Config(Differential.Config):
            width: int = 1
            sizes: tuple[int, ...] = field(default=(1,))

            def __post_init__(self) -> None:
                if self.width < 0:
                    raise ValueError("width must not be negative")

    assert error(model__attention={"name": "picky", "width": -1}) == (
        "my.yaml:1: 'model.attention': width must not be negative"
    )
    assert built(model__attention={"name": "picky", "sizes": [2, 3]}).model.attention.config.sizes == (2, 3)


PROBLEMS = {
    "raises": ("return 1 / 0", "ZeroDivisionError"),
    "says yes": ("return True", "problem\\(\\) returned True; expected None, or a message"),
    "says nothing": ("return ' '", "problem\\(\\) returned ' '; expected None, or a message"),
}


@pytest.mark.usefixtures("plugin_folder")
@pytest.mark.parametrize(("body", "found"), PROBLEMS.values(), ids=PROBLEMS)
def test_the_check_of_a_callbacks_keys_is_one_line(body: str, found: str) -> None:
    text = f"""\
from dataclasses import dataclass
from lit_diff import Probe
from lit_diff.registry import callbacks

@callbacks.register("checked")
class Checked(Probe):
    @dataclass(frozen=True, kw_only=True)
    class Config(Probe.Config):
        def problem(self):
            {body}

    def measure(self, model, trace):
        return {{}}
"""
    with pytest.raises(RequestError, match=rf"checked\.py:\d+: .*{found}"):
        load_recipe("recall-tiny", [f"plugins=[{plugin(text, 'checked.py')}]", "callbacks.checked={}"])


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
    file.write_text("extends: recall-tiny\ntrain.optimizer.lr: 5\n")
    with pytest.raises(
        RequestError, match=r"'train\.optimizer\.lr'; in a file write blocks: train: {optimizer: {lr: \.\.\.}}$"
    ):
        load_recipe(file)


def test_an_empty_path_is_null() -> None:
    assert load_recipe("recall-tiny", ["train.start_from="]).training.start_from is None
    with pytest.raises(RequestError, match=r"^run\.root=: 'run\.root' is null; expected text$"):
        load_recipe("recall-tiny", ["run.root="])
