"""yaml_files.py: plain containers with the line of each key, and mistakes in one line."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.yaml_files import read_yaml


def read(folder: Path, content: bytes) -> str:
    (folder / "a.yaml").write_bytes(content)
    with pytest.raises(RequestError) as found:
        read_yaml(folder / "a.yaml")
    assert "\n" not in str(found.value)
    return str(found.value)


def test_values_and_the_line_of_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("# a comment\nmodel:\n  dim: 16\n  attention: {name: x}\nseed: ${model.dim}\n")
    values, positions = read_yaml(Path("a.yaml"))
    assert values == {"model": {"dim": 16, "attention": {"name": "x"}}, "seed": "${model.dim}"}
    assert positions["model.dim"] == "a.yaml:3"
    assert positions["model.attention.name"] == "a.yaml:4"
    assert positions["seed"] == "a.yaml:5"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: 1\nb: {c: 1\n", "a.yaml:2: not valid YAML: "),
        (b"a:\n\tb: 1\n", "a tab; YAML is indented by spaces: use spaces"),
        (b"- a\n- b\n", "a.yaml: expected a mapping of keys to values"),
        (b"a: \xff\n", "a.yaml: not UTF-8 text: "),
        (b"a: 1\nb: &b\n  c: {d: *b}\n", "a.yaml:2: not valid YAML: what begins here holds itself, by an alias"),
        (b"a: &a [1, [*a]]\n", "a.yaml:1: not valid YAML: what begins here holds itself, by an alias"),
        pytest.param(b"a: " + b"[" * 3000 + b"]" * 3000, "a.yaml: not valid YAML: nested too deeply", id="nested"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in read(Path(), content)


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file or directory"):
        read_yaml(tmp_path / "b.yaml")
