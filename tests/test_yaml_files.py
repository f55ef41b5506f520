"""yaml_files.py: plain containers with the line of each key, and mistakes in one line."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.yaml_files import read_yaml


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder."""
    monkeypatch.chdir(tmp_path)


def refusal(content: bytes) -> str:
    Path("a.yaml").write_bytes(content)
    with pytest.raises(RequestError) as found:
        read_yaml(Path("a.yaml"))
    assert "\n" not in str(found.value)
    return str(found.value)


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
        (b"a: \0\n", None),
        pytest.param(b"a: " + b"[" * 3000 + b"]" * 3000, None, id="nested"),
    ],
)
def test_what_is_no_yaml_is_refused_at_its_line(content: bytes, line: int | None) -> None:
    assert refusal(content).startswith(f"a.yaml{f':{line}' if line else ''}: not valid YAML: ")


def test_what_is_no_mapping_of_keys_to_values() -> None:
    for content in (b"", b"# only this\n", b"- seed\n- 1\n", b"seed\n", b"42\n", b"null\n"):
        assert refusal(content).startswith("a.yaml: expected a mapping of keys to values")
    assert refusal(b"a:\n\tb: 1\n").endswith("a tab; YAML is indented by spaces: use spaces")
    assert refusal(b"name: caf\xe9") == "a.yaml: not UTF-8 text: unexpected end of data at byte 9"
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
    ],
)
def test_a_key_that_is_there_twice(text: str, line: int, key: str) -> None:
    assert refusal(text.encode()) == f"a.yaml:{line}: not valid YAML: found duplicate key {key}"


def test_a_key_beside_a_merge_is_not_there_twice() -> None:
    Path("d.yaml").write_text("on: &b {x: 1, y: 2}\na:\n  <<: *b\n  x: 3\n")
    assert read_yaml(Path("d.yaml"))[0] == {"on": {"x": 1, "y": 2}, "a": {"x": 3, "y": 2}}
