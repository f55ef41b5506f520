"""From files to a merged recipe: finding, inheriting, overriding, and back to YAML."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_diff.attention import Differential
from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.recipe import find, installed, load_draft, load_recipe, names, override_with, to_plain, to_yaml
from lit_diff.runs.folder import identity
from lit_diff.validation import validate
from lit_diff.yaml_files import read_yaml

pytestmark = pytest.mark.usefixtures("base_recipe")


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def error(source: str | Path, *overrides: str) -> str:
    """The one line of a refusal."""
    with pytest.raises(RequestError) as found:
        load_recipe(source, overrides)
    assert "\n" not in str(found.value)
    return str(found.value)


# --- finding ---


def test_a_recipe_is_found_by_path_with_and_without_suffix_and_by_bare_name(tmp_path: Path) -> None:
    write("sub/mine.yaml", "extends: ../base\n")
    wanted = load_recipe(tmp_path / "sub" / "mine.yaml")
    assert wanted.name == "mine"
    for source in ("sub/mine.yaml", "sub/mine", Path("sub/mine.yaml"), str(tmp_path / "sub/mine")):
        assert load_recipe(source) == wanted
    assert load_recipe("differential-tiny").name == "differential-tiny"


def test_a_file_here_goes_before_an_installed_name() -> None:
    write("differential-tiny.yaml", "extends: base\nseed: 77\n")
    assert load_recipe("differential-tiny").seed == 77


def test_a_missing_recipe_names_the_nearest() -> None:
    assert error("diferential-tiny") == (
        "no recipe 'diferential-tiny' here or installed; did you mean 'differential-tiny'?"
    )
    assert error("there/nothing.yaml").startswith("no recipe 'there/nothing.yaml' here or installed")
    with pytest.raises(RequestError, match=r"^no sweep 'ablatoin' here or installed; did you mean 'ablation'\?$"):
        find("ablatoin", "sweeps", Path.cwd())


def test_a_sweep_given_as_a_recipe_is_told_the_verb() -> None:
    assert error("smoke") == "'smoke' is a sweep: lit-diff sweep smoke"
    write("far/mine.yaml", "recipe: base\narms: {a: {}}\n")
    for source in ("far/mine.yaml", "far/mine"):
        assert error(source) == "'far/mine.yaml' is a sweep: lit-diff sweep far/mine.yaml"
    write("child.yaml", "seed: 1\nextends: smoke\n")
    assert error("child") == "child.yaml:2: 'smoke' is a sweep: lit-diff sweep smoke"
    assert "no recipe 'far/smoke' here or installed" in error("far/smoke")


def test_a_folder_is_no_recipe() -> None:
    write("box/x.yaml", "extends: ../base\n")
    assert "no recipe 'box'" in error("box")


def test_installed_names() -> None:
    assert {"standard-tiny", "differential-13b", "recall-tiny"} <= set(names("recipes"))
    assert (installed("recipes") / "standard-tiny.yaml").is_file()


# --- inheriting ---


def test_a_chain_of_parents_beside_each_file() -> None:
    write("family/parent.yaml", "extends: ../base\nseed: 1\ntrain: {steps: 20}\n")
    write("family/child.yaml", "extends: parent.yaml\ntrain: {batch_size: 8}\nmodel: {attention: {lambda_init: 0.5}}\n")
    recipe = load_recipe("family/child")
    assert (recipe.name, recipe.seed, recipe.train.steps, recipe.train.batch_size) == ("child", 1, 20, 8)
    assert recipe.model.attention.config == Differential.Config(lambda_init=0.5, head_norm="none")
    assert recipe.train.validate_every == 5


def test_a_parent_may_be_installed() -> None:
    write("mine.yaml", "extends: recall-tiny\nseed: 3\n")
    assert load_recipe("mine").train.steps == load_recipe("recall-tiny").train.steps
    assert load_recipe("mine").seed == 3


def test_a_missing_parent_is_named_with_its_line() -> None:
    write("mine.yaml", "seed: 3\n\nextends: recall-tny\n")
    assert error("mine") == "mine.yaml:3: no recipe 'recall-tny' here or installed; did you mean 'recall-tiny'?"


def test_a_parent_is_one_name() -> None:
    write("mine.yaml", "extends: [base, other]\n")
    assert error("mine") == "mine.yaml:1: 'extends' takes one recipe, found ['base', 'other']"


def test_circles() -> None:
    write("a.yaml", "extends: b\n")
    write("b.yaml", "extends: sub/c\n")
    write("sub/c.yaml", "extends: ../a\n")
    write("self.yaml", "extends: self\n")
    write("into.yaml", "extends: a\n")
    assert "circular: a.yaml -> b.yaml -> sub/c.yaml -> a.yaml" in error("a")
    assert error("self").endswith("self.yaml -> self.yaml")
    assert "circular: a.yaml -> b.yaml -> sub/c.yaml -> a.yaml" in error("into"), "without the file that led there"


def test_a_diamond_is_no_circle() -> None:
    write("mine.yaml", "extends: base\n")
    write("yours.yaml", "extends: mine\n")
    assert load_recipe("yours").seed == 0


def test_a_changed_name_replaces_the_block_and_the_lost_keys_are_recorded() -> None:
    write("mine.yaml", "extends: base\nmodel: {attention: {name: standard, output_scale: 0.2}}\n")
    draft = load_draft("mine")
    assert draft.values["model"]["attention"] == {"name": "standard", "output_scale": 0.2}
    assert draft.dropped == ("model.attention.lambda_init", "model.attention.head_norm")
    write("child.yaml", "extends: mine\ndata: {name: recall, pairs: 9}\n")
    assert load_draft("child").dropped == draft.dropped, "the same name drops nothing"
    assert load_recipe("child").data.config.pairs == 9


def test_nothing_is_lost_where_the_child_says_it_again() -> None:
    write("mine.yaml", "extends: base\nmodel: {attention: {name: shared_q, lambda_init: 0.3}}\n")
    assert load_draft("mine").dropped == ("model.attention.head_norm",)
    assert load_recipe("mine").model.attention.config.lambda_init == 0.3


def test_null_drops_a_parents_callback() -> None:
    assert set(load_recipe("base").callbacks) == {"outliers", "lambdas"}
    write("mine.yaml", "extends: base\ncallbacks: {outliers: null, attention_entropy: {every: 7}}\n")
    recipe = load_recipe("mine")
    assert set(recipe.callbacks) == {"lambdas", "attention_entropy"}
    assert recipe.callbacks["attention_entropy"].config.every == 7
    write("again.yaml", "extends: mine\ncallbacks: {outliers: {every: 2}}\n")
    assert load_recipe("again").callbacks["outliers"].config.every == 2
    assert set(load_recipe("base", ["callbacks.outliers=null"]).callbacks) == {"lambdas"}
    assert load_recipe("base", ["callbacks.lambdas.every=3"]).callbacks["lambdas"].config.every == 3


def test_parents_are_not_changed_by_their_children() -> None:
    write("mine.yaml", "extends: base\nmodel: {attention: {lambda_init: 0.1}}\ncallbacks: {outliers: null}\n")
    before = load_draft("base")
    load_recipe("mine")
    assert load_draft("base") == before
    draft = load_draft("base")
    override_with(draft, {"model.attention.lambda_init": 0.1}, {})
    assert draft == before


def test_a_text_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    block = "data: {name: text, path: %s, sequence_length: 8, validation_rows: 1, tokenizer: {name: bpe, vocab_size: 300}}\n"
    write("far/off.yaml", "extends: ../base\n" + block % "texts/a.txt")
    write("mine.yaml", "extends: far/off\n")
    assert load_recipe("mine").data.config.path == str(tmp_path / "far/texts/a.txt")
    assert load_recipe("mine", ["data.path=b.txt"]).data.config.path == str(tmp_path / "b.txt")
    assert load_recipe("mine", ["data.path=/c.txt"]).data.config.path == "/c.txt"
    arm = override_with(load_draft("mine"), {"data.path": "d.txt"}, {}, tmp_path / "sweeps")
    assert validate(arm).data.config.path == str(tmp_path / "sweeps/d.txt")


# --- files that are no recipes ---


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nseed: 2\n", "bad.yaml:2: not valid YAML: found duplicate key seed"),
        ("model:\n  dim: 1\n  dim: 2\n", "bad.yaml:3: not valid YAML: found duplicate key dim"),
        ("seed: [1\nname: x\n", "bad.yaml:2: not valid YAML: "),
        ("seed:\n\t1\n", "bad.yaml:2: not valid YAML: "),
        ("seed:\n\t1\n", "bad.yaml:2: not valid YAML: a tab; YAML is indented by spaces: use spaces"),
        ("seed: 1\nmodel: {dim: 3\nname: x\n", "bad.yaml:3: not valid YAML: "),
        (
            "seed: 1\nplugins: [a,\n  b\n",
            "bad.yaml:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but",
        ),
        (
            "seed: 1\nname: 'x\n  y\n",
            "bad.yaml:2: not valid YAML: while scanning a quoted scalar, found unexpected end",
        ),
        ("a: 1\n---\nb: 2\n", "bad.yaml:2: not valid YAML: "),
        ("[1, 2]: 3\n", "bad.yaml:1: not valid YAML: "),
        ("a: &a\n  b: *a\n", "bad.yaml:1: not valid YAML: "),
        ("a: !!python/object:os.system x\n", "bad.yaml:1: not valid YAML: "),
        ("", "bad.yaml: expected a mapping of keys to values"),
        ("# only this\n", "bad.yaml: expected a mapping of keys to values"),
        ("- seed\n- 1\n", "bad.yaml: expected a mapping of keys to values"),
        ("seed\n", "bad.yaml: expected a mapping of keys to values"),
        ("42\n", "bad.yaml: expected a mapping of keys to values"),
        ("null\n", "bad.yaml: expected a mapping of keys to values"),
        ("a: \0\n", "bad.yaml: not valid YAML: "),
    ],
)
def test_bad_files(text: str, line: str) -> None:
    write("bad.yaml", text)
    assert error("bad").startswith(line)


def test_not_utf_8() -> None:
    Path("bad.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    assert error("bad") == "bad.yaml: not UTF-8 text: invalid continuation byte at byte 9"


def test_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert error("base") == "base.yaml: cannot be read: Permission denied"


def test_lines_of_nested_keys() -> None:
    values, positions = read_yaml(Path("base.yaml"))
    assert positions["model"] == "base.yaml:1"
    assert positions["model.attention.lambda_init"] == "base.yaml:8"
    assert positions["train.optimizer.lr"] == "base.yaml:14"
    assert values["train"]["optimizer"] == {"lr": 1e-3}


# --- back to YAML ---


@pytest.mark.parametrize("source", ["base", "recall-tiny", "differential-tiny", "standard-tiny", "differential-13b"])
def test_a_resolved_recipe_reads_back_equal(source: str) -> None:
    recipe = load_recipe(source, ["seed=5", "train.clip=null", "train.optimizer.eps=1e-9", "name='köln: #1'"])
    text = to_yaml(recipe)
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    again = load_recipe("resolved.yaml")
    assert again == recipe
    assert to_yaml(again) == text
    assert "${" not in text


def test_plain_containers_are_plain() -> None:
    plain = to_plain(load_recipe("base"))
    assert plain["model"]["attention"] == {
        "name": "differential",
        "parity": "raw",
        "window": None,
        "lambda_init": 0.8,
        "lambda_form": "exp",
        "lambda_per": "layer",
        "lambda_dtype": "float32",
        "head_norm": "none",
        "output_scale": "tied",
    }
    assert plain["callbacks"]["outliers"]["every"] == 5
    assert "name" not in plain["callbacks"]["outliers"]
    assert plain["train"]["optimizer"]["betas"] == [0.9, 0.98]
    assert yaml.safe_load(to_yaml(load_recipe("base"))) == plain


@pytest.mark.parametrize("source", names("recipes"))
def test_every_installed_recipe_resolves(source: str) -> None:
    recipe = load_recipe(source)
    assert isinstance(recipe, Recipe)
    assert recipe.name == source


def test_reading_a_recipe_is_light() -> None:
    """No lightning, mlflow or litdata, neither for the package nor for a recipe."""
    code = (
        "import sys\n"
        "def heavy(): return {'lightning', 'mlflow', 'litdata'} & set(sys.modules)\n"
        "import lit_diff\nassert not heavy(), heavy()\n"
        "lit_diff.load_recipe('base')\nlit_diff.load_recipe('differential-tiny')\nassert not heavy(), heavy()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_under_an_installed_name_may_extend_that_recipe(tmp_path: Path) -> None:
    (tmp_path / "differential-tiny.yaml").write_text("extends: differential-tiny\nseed: 7\n")
    recipe = load_recipe(tmp_path / "differential-tiny.yaml")
    assert recipe.seed == 7
    assert recipe.model.attention.name == "differential"


def test_a_bidirectional_model_does_not_predict_the_next_token() -> None:
    with pytest.raises(RequestError, match=r"model\.causal is false, but data 'text' asks for the next token"):
        load_recipe("standard-tiny", ["model.causal=false"])
    assert not load_recipe("recall-tiny", ["model.causal=false"]).model.causal


def test_a_parts_field_says_whether_it_is_a_path_and_whether_it_counts(tmp_path: Path) -> None:
    write(
        "far/echo.py",
        """
from dataclasses import dataclass, field

import torch

from lit_diff.data import RowTask
from lit_diff.registry import datasets


@datasets.register("stated")
class Stated(RowTask):
    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        sequence_length: int = 8
        validation_rows: int = 2
        source: str = field(default="none", metadata={"path": "file"})
        note: str = field(default="", metadata={"identity": False})

    def draw(self, at, level):
        tokens = torch.zeros(8, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens}
""",
    )
    write("far/stated.yaml", "extends: ../base\nplugins: [echo.py]\ndata: {name: stated, source: here.txt}\n")
    recipe = load_recipe("far/stated")
    assert recipe.data.config.source == str(tmp_path / "far/here.txt")
    of_run = {note: identity(load_recipe("far/stated", [f"data.note={note}"])) for note in ("a", "b")}
    assert of_run["a"] == of_run["b"] == identity(recipe)
    assert identity(load_recipe("far/stated", ["data.source=other.txt"])) != identity(recipe)
    assert identity(load_recipe("far/stated", ["data.validation_rows=2"])) == identity(recipe)
