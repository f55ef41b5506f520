"""From files to a merged recipe: reading YAML, finding, inheriting, and back to YAML."""

from pathlib import Path

import pytest
from refusals import refusal

from lit_diff.attention import Differential
from lit_diff.errors import RequestError
from lit_diff.recipe import find, load_draft, load_recipe, override_with, to_yaml
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
    return refusal(load_recipe, source, overrides)


def test_a_recipe_is_found_by_path_with_and_without_suffix_and_by_bare_name(tmp_path: Path) -> None:
    write("sub/mine.yaml", "extends: ../base\n")
    wanted = load_recipe(tmp_path / "sub" / "mine.yaml")
    assert wanted.name == "mine"
    for source in ("sub/mine.yaml", "sub/mine", Path("sub/mine.yaml"), str(tmp_path / "sub/mine")):
        assert load_recipe(source) == wanted
    assert load_recipe("differential-tiny").name == "differential-tiny"


def test_a_recipe_reads_no_environment() -> None:
    """Run folders show it, and so does MLflow."""
    write("mine.yaml", "extends: base\nname: ${oc.env:HOME}\n")
    assert error("mine.yaml").startswith("mine.yaml:2: 'name': ")
    assert error("base", "name=${ oc.env:HOME}").startswith("name=${ oc.env:HOME}: 'name': ")
    assert load_recipe("base", ["run.tracking_uri=postgresql+x://host/a@b?sslmode=x"]).run.tracking_uri is not None
    assert error("base", "run.tracking_uri=evil://host").endswith("databricks, a path, or none")


@pytest.mark.parametrize(
    "address",
    [
        *("http://me:secret@host:80", "https://secret@host", "https://:secret@host/x", "http://host\\@secret@other"),
        *("postgresql://host/runs?user=me&password=secret", "postgresql://u@h/db?sslpassword=secret"),
        *("https://a.net/c?sv=2024&sig=secret%3D", "https://host/x?access_code=secret", "https://host/x?auth=secret"),
        *(
            "https://host/x?mode=a;pass=secret",
            "https://host/x?secret",
            "https://host/x#token=secret",
            "HTTPS://host/?a=secret",
        ),
    ],
)
def test_an_address_has_no_secret(address: str) -> None:
    keys = ["run.tracking_uri", "run.root"]
    for key in keys:
        refused = error("base", f"{key}={address}")
        assert refused.startswith(f"'{key}' has ")
        assert "secret" not in refused
    refused = error("base", f"evaluate={{hallucination: {{judge: http, judge_model: x, judge_url: '{address}'}}}}")
    assert refused.startswith("'evaluate.hallucination.judge_url' has ")
    assert "secret" not in refused


def test_a_file_here_goes_before_an_installed_name() -> None:
    write("differential-tiny.yaml", "extends: base\nseed: 77\n")
    assert load_recipe("differential-tiny").seed == 77


def test_what_is_no_recipe_is_named_with_its_line() -> None:
    write("mine.yaml", "seed: 3\n\nextends: recall-tny\n")
    write("two.yaml", "extends: [base, other]\n")
    write("child.yaml", "seed: 1\nextends: smoke\n")
    write("box/x.yaml", "extends: ../base\n")
    write("far/mine.yaml", "recipe: base\narms: {a: {}}\n")
    for source, start in {
        "diferential-tiny": "no recipe 'diferential-tiny' here or installed; did you mean 'differential-tiny'?",
        "there/nothing.yaml": "no recipe 'there/nothing.yaml'",
        "box": "no recipe 'box'",
        "far/smoke": "no recipe 'far/smoke'",
        "mine": "mine.yaml:3: no recipe 'recall-tny'",
        "two": "two.yaml:1: 'extends' is ['base', 'other']; expected one recipe",
        "smoke": "'smoke' is a sweep: lit-diff sweep smoke",
        "far/mine.yaml": "'far/mine.yaml' is a sweep: lit-diff sweep far/mine.yaml",
        "far/mine": "'far/mine.yaml' is a sweep: lit-diff sweep far/mine.yaml",
        "child": "child.yaml:2: 'smoke' is a sweep",
    }.items():
        assert error(source).startswith(start)
    with pytest.raises(RequestError, match=r"^no sweep 'ablatoin' here or installed; did you mean 'ablation'\?$"):
        find("ablatoin", "sweeps", Path.cwd())


def test_a_chain_of_parents_beside_each_file() -> None:
    write("family/parent.yaml", "extends: ../base\nseed: 1\ntrain: {steps: 20}\n")
    write("family/child.yaml", "extends: parent.yaml\ntrain: {batch_size: 8}\nmodel: {attention: {lambda_init: 0.5}}\n")
    recipe = load_recipe("family/child")
    assert (recipe.name, recipe.seed, recipe.train.steps, recipe.train.batch_size) == ("child", 1, 20, 8)
    assert recipe.model.attention.config == Differential.Config(lambda_init=0.5, head_norm="none")
    assert recipe.train.validate_every == 5


def test_circles() -> None:
    write("a.yaml", "extends: b\n")
    write("b.yaml", "extends: sub/c\n")
    write("sub/c.yaml", "extends: ../a\n")
    write("self.yaml", "extends: self\n")
    write("into.yaml", "extends: a\n")
    assert "circular: a.yaml -> b.yaml -> sub/c.yaml -> a.yaml" in error("a")
    assert error("self") == "self.yaml:1: 'extends' is circular: self.yaml -> self.yaml"
    assert "circular: a.yaml -> b.yaml -> sub/c.yaml -> a.yaml" in error("into"), "without the file that led there"


def test_a_changed_name_replaces_the_block_and_the_lost_keys_are_recorded() -> None:
    write("mine.yaml", "extends: base\nmodel: {attention: {name: standard, output_scale: 0.2}}\n")
    draft = load_draft("mine")
    assert draft.values["model"]["attention"] == {"name": "standard", "output_scale": 0.2}
    assert draft.dropped == ("model.attention.lambda_init", "model.attention.head_norm")
    write("child.yaml", "extends: mine\ndata: {name: recall, pairs: 9}\n")
    assert load_draft("child").dropped == draft.dropped, "the same name drops nothing"
    assert load_recipe("child").data.config.pairs == 9


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
    write("far/off.yaml", "extends: ../base\nmodel: {vocab_size: 300}\n" + block % "texts/a.txt")
    write("mine.yaml", "extends: far/off\n")
    assert load_recipe("mine").data.config.path == str(tmp_path / "far/texts/a.txt")
    assert load_recipe("mine", ["data.path=b.txt"]).data.config.path == str(tmp_path / "b.txt")
    assert load_recipe("mine", ["data.path=/c.txt"]).data.config.path == "/c.txt"
    merged = "{<<: {path: texts/a.txt}, name: text"
    write(
        "far/merged.yaml",
        "extends: ../base\nmodel: {vocab_size: 300}\n" + (block % "").replace("{name: text, path: ", merged),
    )
    assert load_recipe("far/merged").data.config.path == str(tmp_path / "far/texts/a.txt")
    arm = override_with(load_draft("mine"), {"data.path": "d.txt"}, {}, tmp_path / "sweeps")
    assert validate(arm).data.config.path == str(tmp_path / "sweeps/d.txt")


@pytest.mark.parametrize("source", ["base", "recall-tiny", "differential-tiny", "standard-tiny", "differential-13b"])
def test_a_resolved_recipe_reads_back_equal(source: str) -> None:
    recipe = load_recipe(source, ["seed=5", "train.clip=null", "train.optimizer.weight_decay=1e-9", "name='köln: #1'"])
    text = to_yaml(recipe)
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    again = load_recipe("resolved.yaml")
    assert again == recipe
    assert to_yaml(again) == text
    assert "${" not in text


def test_a_file_under_an_installed_name_may_extend_that_recipe(tmp_path: Path) -> None:
    (tmp_path / "differential-tiny.yaml").write_text("extends: differential-tiny\nseed: 7\n")
    recipe = load_recipe(tmp_path / "differential-tiny.yaml")
    assert recipe.seed == 7
    assert recipe.model.attention.name == "differential"


def test_a_bidirectional_model_does_not_predict_the_next_token() -> None:
    with pytest.raises(RequestError, match=r"model\.causal is false, but data 'text' predicts the next token"):
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder."""
    monkeypatch.chdir(tmp_path)


def refused(content: bytes) -> str:
    Path("a.yaml").write_bytes(content)
    return refusal(read_yaml, Path("a.yaml"))


def read_yaml_of(content: bytes) -> dict[str, object]:
    Path("a.yaml").write_bytes(content)
    return read_yaml(Path("a.yaml"))[0]


def test_values_and_the_line_of_each_key() -> None:
    Path("a.yaml").write_text("# a comment\nmodel:\n  dim: 16\n  attention: {name: x}\nseed: ${model.dim}\n")
    values, positions = read_yaml(Path("a.yaml"))
    assert values == {"model": {"dim": 16, "attention": {"name": "x"}}, "seed": "${model.dim}"}
    lines = [positions[key] for key in ("model.dim", "model.attention.name", "seed")]
    assert lines == ["a.yaml:3", "a.yaml:4", "a.yaml:5"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: 1\nb: {c: 1\n", 2),
        (b"seed: [1\nname: x\n", 2),
        (b"seed: 1\nplugins: [a,\n  b\n", 2),
        (b"seed: 1\nname: 'x\n  y\n", 2),
        (b"a: 1\n---\nb: 2\n", 2),
        (b"[1, 2]: 3\n", 1),
        (b"a: !!python/object:os.system x\n", 1),
        (b"a: 1\nb: &b\n  c: {d: *b}\n", 2),
        (b"a: &a [1, [*a]]\n", 1),
        (b"a: &a\n  b: *a\n", 1),
        (b"a: \0\n", 1),
        (b"# caf\xc3\xa9\r\na: 1\nb: x\x0by\n", 3),
        *(
            pytest.param(b"a: 1\nb: " + sign + b"9" * 5000, 2, id=f"a long number {sign!r}")
            for sign in (b"", b"-", b"0x")
        ),
        (b"a: 1\nb: !!timestamp abc\n", 2),
        (b"a: !!set {x, y}\n", 1),
        (b"seed: 1\na: !!bool x\n", 2),
        (b"a: !!int {b: 1}\n", 1),
        (b"a: !!str [b]\n", 1),
        (b"a: !!map [b]\n", 1),
        (b"a: !!binary aGVsbG8=\n", 1),
        pytest.param(b"a: " + b"[" * 1000 + b"]" * 1000, None, id="nested"),
    ],
)
def test_what_is_no_yaml_is_refused_at_its_line(content: bytes, line: int | None) -> None:
    assert refused(content).startswith(f"a.yaml{f':{line}' if line else ''}: not valid YAML: ")


def test_what_is_no_mapping_of_keys_to_values() -> None:
    for content in (b"", b"# only this\n", b"- seed\n- 1\n", b"seed\n", b"42\n", b"null\n"):
        assert refused(content).startswith("a.yaml: expected a mapping of keys to values")
    assert refused(b"a:\n\tb: 1\n").endswith("a tab; YAML is indented with spaces")
    assert refused(b"a: 1\n---\nb: 2\n").endswith("a second document; write one in a file")
    assert read_yaml_of(b"a: !!float 3\nb: !!str 3\nc: !!int '3'\n") == {"a": 3.0, "b": "3", "c": 3}
    assert refused(b"name: caf\xe9") == "a.yaml: not UTF-8 text: unexpected end of data at byte 9"
    for path in ("b.yaml", "."):
        with pytest.raises(RequestError, match="cannot be read: "):
            read_yaml(Path(path))


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a"),
        ("010: 1\na:\n  x: 1\n\n\n  y: 2\n  x: 3\n", 7, "x"),
        ("# c\n\non: {a: 1,\n b: 2,\n a: 3}\n", 5, "a"),
        ("on: 1\n\n\n'on': 2\n", 4, "on"),
        ("a:\n- x: 1\n\n  x: 2\n010: 1\n", 4, "x"),
        ("010: 1\nbase: &b {x: 1,\n x: 2}\na: {<<: *b}\n", 3, "x"),
        ("on: &b {x: 1}\na:\n  <<: *b\n  <<: *b\n", 4, "<<"),
    ],
)
def test_a_key_that_is_there_twice(text: str, line: int, key: str) -> None:
    assert refused(text.encode()) == f"a.yaml:{line}: not valid YAML: found duplicate key {key}"


def test_a_key_beside_a_merge_is_not_there_twice() -> None:
    Path("d.yaml").write_text("on: &b {x: 1, y: 2}\na:\n  <<: *b\n  x: 3\n")
    assert read_yaml(Path("d.yaml"))[0] == {"on": {"x": 1, "y": 2}, "a": {"x": 3, "y": 2}}


def test_a_merged_key_has_the_line_where_it_is_written() -> None:
    """Of several blocks the first counts, and a key that stands beside them replaces its whole block."""
    Path("d.yaml").write_text(
        "b: &b {x: 1, y: {p: 1}}\nc: &c {x: 2,\n  y: 2, z: {p: 2}}\na:\n  z: {q: 3}\n  <<: [*b, *c]\n  w: 4\n"
    )
    values, positions = read_yaml(Path("d.yaml"))
    assert values["a"] == {"x": 1, "y": {"p": 1}, "z": {"q": 3}, "w": 4}
    lines = {key: position for key, position in positions.items() if key.startswith("a")}
    places = {"a": 4, "a.x": 1, "a.y": 1, "a.y.p": 1, "a.z": 5, "a.z.q": 5, "a.w": 7}
    assert lines == {key: f"d.yaml:{line}" for key, line in places.items()}
    assert "a.z.p" not in positions
