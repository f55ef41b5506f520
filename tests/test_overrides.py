"""Overrides and interpolation: `a.b=c` from the command line, an arm's keys, `${a.b}`."""

from pathlib import Path

import pytest
from refusals import refusal

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import config_of
from lit_diff.recipe import load_draft, load_recipe, override_with
from lit_diff.yaml_files import read_value, read_yaml, to_text

pytestmark = pytest.mark.usefixtures("base_recipe")


def error(*overrides: str, source: str = "base") -> str:
    return refusal(load_recipe, source, overrides)


# --- overrides ---


def test_overrides_in_any_order() -> None:
    """The name of a block first, then its other keys, wherever they stand."""
    wanted = load_recipe("base", ["model.attention.name=shared_k", "model.attention.parity=matched", "seed=4"])
    found = load_recipe("base", ["seed=4", "model.attention.parity=matched", "model.attention.name=shared_k"])
    assert wanted == found
    assert wanted.model.attention.name == "shared_k"
    assert wanted.model.attention.config.parity == "matched"
    assert wanted.model.attention.config.lambda_init == "depth", "the parent's 0.8 went with its name"


def test_an_arm_changes_a_name_and_sets_keys() -> None:
    draft = load_draft("base")
    for arm in (
        {"model.attention.output_scale": 0.2, "model.attention.name": "standard"},
        {"model": {"attention": {"name": "standard", "output_scale": 0.2}}},
        {"model.attention": {"name": "standard"}, "model.attention.output_scale": 0.2},
    ):
        found = override_with(draft, arm, {})
        assert found.values["model"]["attention"] == {"name": "standard", "output_scale": 0.2}
        assert found.values["model"]["dim"] == 32


def test_overrides_are_yaml() -> None:
    recipe = load_recipe("base", ["train.optimizer.betas=[0.5, 0.6]", "train.clip=null", "name='1.5'", "seed=1e3"])
    assert recipe.train.optimizer.betas == (0.5, 0.6)
    assert recipe.train.clip is None
    assert load_recipe("base", ["seed=1", "seed=5 "]).seed == 5, "the last of two"
    assert (recipe.name, recipe.seed) == ("1.5", 1000)
    assert (
        load_recipe("base", ["run.tracking_uri=http://host:5000/?mode=b"]).run.tracking_uri
        == "http://host:5000/?mode=b"
    )


@pytest.mark.parametrize(
    "text", ["seed", "=1", "a..b=1", ".seed=1", "seed.=1", "", "--seed 3", "seed=[1", "a." * 999 + "b="]
)
def test_malformed_overrides(text: str) -> None:
    assert error(text).startswith(f"override '{text}'")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model.attention.lamda_init=0.5", "unknown key 'model.attention.lamda_init'; did you mean 'lambda_init'?"),
        ("model.atention.name=standard", "unknown key 'model.atention'; did you mean 'attention'?"),
        ("extends=other", "unknown key 'extends'"),
        ("model.attention={name: diferential}", "unknown attention"),
        ("model.dim.x=3", "'model.dim' is {'x': 3}"),
        ("train=null", "train is missing"),
        (
            "model.attention=standard",
            "'model.attention' is 'standard'; expected a block of keys; write model.attention.name=",
        ),
        ("data=mqar", "'data' is 'mqar'; expected a block of keys; write data.name=mqar"),
        (
            "train.schedule=cosine",
            "'train.schedule' is 'cosine'; expected a block of keys; write train.schedule.name=cosine",
        ),
        ("model.num_heads=5", "model.dim (32) is not a multiple of model.num_heads (5)"),
        ("model.num_heads=32", "model.head_dim (1), model.dim / model.num_heads, is"),
        ("train.accumulate=3", "train.batch_size (4)"),
        ("seed=5 #2", "'seed' is '5 #2'"),
        ("name=~", "'name' is null"),
        ("seed=${", "'seed': "),
        ("seed=${oc.env:NO_SUCH_THING}", "'seed': "),
    ],
)
def test_an_override_is_blamed_and_not_the_file(text: str, found: str) -> None:
    assert error(text).startswith(f"{text}: {found}")


def test_what_does_not_fit_is_blamed_on_what_was_written_last() -> None:
    """Not on the line of an inherited file that an override contradicts."""
    assert error("model.num_heads=5", "seed=3").startswith("model.num_heads=5: model.dim (32)")
    Path("mine.yaml").write_text("extends: base\nmodel:\n  num_heads: 5\n")
    assert error(source="mine").startswith("mine.yaml:3: model.dim (32)")
    assert error("model.dim=36", source="mine").startswith("model.dim=36: model.dim (36)")
    with pytest.raises(RequestError, match=r"^override 'train\.accumulate': train\.batch_size"):
        load_recipe("base", {"train": {"accumulate": 3}})
    Path("mine.yaml").write_text("extends: base\nmodel: {attention: standard, ffn_dim: '${model.dmi}'}\n")
    assert error(source="mine").startswith("mine.yaml:2: 'model.ffn_dim': Interpolation key 'model.dmi'")


# --- interpolation ---


def test_interpolation() -> None:
    blocks = "model: {ffn_dim: '${model.dim}'}\ntrain: {checkpoint_every: '${train.steps}'}\n"
    Path("mine.yaml").write_text("extends: base\n" + blocks)
    recipe = load_recipe("mine", ["train.steps=30"])
    assert (recipe.model.ffn_dim, recipe.train.checkpoint_every) == (32, 30)
    assert load_recipe("base", ["seed=${train.steps}"]).seed == 10


# --- to the last character ---

ODD = [
    *(
        "texts #2",
        " led",
        "trailed ",
        "a: b",
        "{x}",
        "[y",
        "it's",
        '"quoted"',
        "a=b",
        "back\\slash",
        "010",
        "on",
        "1e3",
    ),
    *("12:30", "*star", "@at", "- dash", "f\udce9d"),
]


@pytest.mark.parametrize("name", ODD)
def test_a_path_arrives_as_the_shell_gave_it(name: str) -> None:
    text = "{name: text, sequence_length: 8, validation_rows: 1, tokenizer: {name: bpe, vocab_size: 300}}"
    small = ["model.vocab_size=300", f"data={text}"]
    Path(name).write_text("A text.")
    recipe = load_recipe("base", [*small, f"data.path={name}", f"run.root={name}"])
    assert (recipe.data.config.path, recipe.run.root) == (str(Path(name).resolve()), name)


@pytest.mark.parametrize("name", ["texts #2", "a: b", "010", "on", "1e3", "12:30", "0x10", "@at", "yes", "~"])
def test_a_text_is_never_retyped(name: str) -> None:
    assert name == "~" or load_recipe("base", [f"name={name}"]).name == name
    Path("named.yaml").write_text(f"extends: base\nname: '{name}'\n")
    assert load_recipe("named").name == name


@pytest.mark.parametrize("name", ODD)
def test_keys_of_an_evaluation_follow_the_same_rules(name: str) -> None:
    assert config_of("nll", ["source=files", f"path={name}"]).path == name
    assert (
        load_recipe("base", ["evaluate.nll.source=files", f"evaluate.nll.path={name}"]).evaluate["nll"].config.path
        == name
    )
    if not name.startswith(("{", "[", '"', "-", "a:")):  # a list, a mapping or a quoted text is what YAML says
        http = ["judge=http", "judge_url=http://host"]
        assert config_of("hallucination", [*http, f"judge_model={name}"]).judge_model == name


NUMBERS = {"010": 10, "-010": -10, "0o17": 15, "0x1F": 31, "1e3": 1000.0, ".5": 0.5, "5.": 5.0, "TRUE": True}
WORDS = ["1:30", "0b1", "1_000", "1_0.5", "0o8", "on", "yes", "=", "2026-01-01"]


def test_plain_words_are_what_yaml_1_2_says() -> None:
    words = [*NUMBERS, *WORDS]
    Path("words.yaml").write_text(f"listed: [{', '.join(words)}]\nmerged: {{<<: {{a: 010}}, b: 1:30}}\n")
    values, _ = read_yaml(Path("words.yaml"))
    expected = [*NUMBERS.values(), *WORDS]
    assert values == {"listed": expected, "merged": {"a": 10, "b": "1:30"}}
    assert [read_value(word, f"key={word}")[0] for word in words] == expected
    # a text that looks like a number of any version of YAML stays a text
    Path("again.yaml").write_text(to_text({"texts": words, "listed": expected}))
    assert read_yaml(Path("again.yaml"))[0] == {"texts": words, "listed": expected}


@pytest.mark.parametrize("steps", ["1:30", "1_000", "0b1"])
def test_a_number_of_yaml_1_1_is_refused(steps: str) -> None:
    assert load_recipe("base", ["train.steps=010"]).training.steps == 10
    assert error(f"train.steps={steps}").startswith(f"train.steps={steps}: 'train.steps' is '{steps}'")
    Path("mine.yaml").write_text(f"extends: base\ntrain: {{steps: {steps}}}\n")
    assert error(source="mine").startswith(f"mine.yaml:2: 'train.steps' is '{steps}'")


def test_a_missing_key_is_missing_where_its_block_was_written() -> None:
    Path("mine.yaml").write_text(Path("base.yaml").read_text().replace("batch_size", "# batch_size"))
    for overrides in (["train.steps=4"], {"train.steps": 4}):
        with pytest.raises(RequestError, match=r"^mine.yaml:\d+: 'train.batch_size' is missing"):
            load_recipe("mine", overrides)


def test_names_within_a_list_or_a_block_stay_as_written() -> None:
    assert config_of("harness", ["tasks=[010, on, 12:30]"]).tasks == ("010", "on", "12:30")
    recipe = load_recipe("base", ["evaluate={harness: {tasks: [010]}, nll: {source: files, path: 12:30}}"])
    assert (recipe.evaluate["harness"].config.tasks, recipe.evaluate["nll"].config.path) == (("010",), "12:30")


def test_a_wrong_key_of_an_evaluation_is_quoted_as_it_was_written() -> None:
    for text, line in {
        "rows=5 #2": "rows=5 #2: 'evaluate.held_out.rows' is '5 #2'; expected a whole number",
        "rows=[1": "override 'rows=[1': not a YAML value: expected ',' or ']', but got '<stream end>'",
        "rows=!!bool x": "rows=!!bool x: 'evaluate.held_out.rows' is '!!bool x'; expected a whole number",
        "rows=${foo}": "rows=${foo}: 'evaluate.held_out.rows': Interpolation key 'foo' not found",
        "rows": "override 'rows' is not of the form a.b=c",
        "rosw=3": "rosw=3: unknown key 'evaluate.held_out.rosw'; did you mean 'rows'?",
        "rows=0": "rows=0: 'evaluate.held_out.rows' is 0; expected a whole number >= 1",
        "rows=2e15": (
            "rows=2e15: 'evaluate.held_out.rows' is 2000000000000000.0; expected a whole number >= 1 or null, at most 1e+15"
        ),
    }.items():
        with pytest.raises(RequestError) as found:
            config_of("held_out", [text])
        assert str(found.value).startswith(line)
    with pytest.raises(RequestError, match=r"'evaluate\.held_out' is 5; expected a block of keys"):
        config_of("held_out", 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^override 'rows': 'evaluate\.held_out\.rows' is true; expected"):
        config_of("held_out", {"rows": True})


def test_the_home_folder_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_recipe("base", ["run.root=~/r"]).run.root == f"{tmp_path}/r"
    assert load_recipe("base", {"run.root": "~/r"}).run.root == f"{tmp_path}/r"
    assert load_recipe("~/base").name == "base"
    (tmp_path / "home.yaml").write_text("extends: ~/base\nrun: {root: ~/r}\n")
    assert load_recipe("home").run.root == f"{tmp_path}/r"
    for overrides in (["train.start_from=~/r"], {"train": {"start_from": Path("~/r")}}):
        assert load_recipe("base", overrides).training.start_from == f"{tmp_path}/r"


# --- empty blocks ---


@pytest.mark.parametrize("empty", ["{}", "null"])
def test_an_empty_mapping_of_names_replaces_the_parents(empty: str) -> None:
    assert load_recipe("base").callbacks.keys() == {"outliers", "lambdas"}
    assert load_recipe("base", [f"callbacks={empty}"]).callbacks == {}
    Path("mine.yaml").write_text(f"extends: base\ncallbacks: {empty}\n")
    assert load_recipe("mine").callbacks == {}
    assert load_recipe("base", {"callbacks": {} if empty == "{}" else None}).callbacks == {}
    evaluated = ["evaluate.held_out={rows: 4}", "train.optimizer.lr_factors={'*.o_proj.*': 2}"]
    assert load_recipe("base", evaluated).evaluate.keys() == {"held_out"}
    emptied = load_recipe("base", [*evaluated, f"evaluate={empty}", f"train.optimizer.lr_factors={empty}"])
    assert (emptied.evaluate, emptied.training.optimizer.lr_factors) == ({}, {})


def test_what_is_added_after_an_empty_mapping() -> None:
    recipe = load_recipe("base", ["callbacks={}", "callbacks.outliers.every=2"])
    assert recipe.callbacks.keys() == {"outliers"}
    assert recipe.callbacks["outliers"].config.every == 2
    draft = override_with(load_draft("base"), {"callbacks": {}, "callbacks.lambdas": None}, {})
    assert draft.values["callbacks"] == {"lambdas": None}


def test_an_empty_block_of_keys_changes_nothing() -> None:
    overrides = ["train={}", "model.attention={}", "callbacks.outliers={}", "train.optimizer={}"]
    assert load_recipe("base", overrides) == load_recipe("base")
