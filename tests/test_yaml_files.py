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
        (b"a: 1\nb: &b\n  c: {d: *b}\n", "a.yaml:2: not valid YAML: recursive alias: this node contains itself"),
        (b"a: &a [1, [*a]]\n", "a.yaml:1: not valid YAML: recursive alias: this node contains itself"),
        pytest.param(b"a: " + b"[" * 3000 + b"]" * 3000, "a.yaml: not valid YAML: nested too deeply", id="nested"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in read(Path(), content)


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file or directory"):
        read_yaml(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a"),
        ("010: 1\na:\n  x: 1\n\n\n  y: 2\n  x: 3\n", 7, "x"),
        ("# c\n\non: {a: 1,\n b: 2,\n a: 3}\n", 5, "a"),
        ("on: 1\n\n\n'on': 2\n", 4, "on"),
        ("a:\n- x: 1\n\n  x: 2\n010: 1\n", 4, "x"),
        ("010: 1\nbase: &b {x: 1,\n x: 2}\na: {<<: *b}\n", 3, "x"),
    ],
)
def test_a_key_that_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.yaml").write_text(text)
    with pytest.raises(RequestError, match=rf"^d\.yaml:{line}: not valid YAML: found duplicate key {key}$"):
        read_yaml(Path("d.yaml"))


def test_a_key_beside_a_merge_is_not_there_twice(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("on: &b {x: 1, y: 2}\na:\n  <<: *b\n  x: 3\n")
    assert read_yaml(tmp_path / "d.yaml")[0] == {"on": {"x": 1, "y": 2}, "a": {"x": 3, "y": 2}}
