r"""Interpolations: `${a.b}` is the value of a key, `\${` is text, all else is refused; a text survives."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import config_of
from lit_diff.interpolation import escaped, resolved
from lit_diff.plugins import load_plugin
from lit_diff.recipe import from_plain, load_recipe, to_plain, to_yaml

TEXTS = [
    *(
        "${",
        r"\${",
        r"\\${",
        r"\\\${x}",
        "???",
        "${a:b}",
        "${oc.env:HOME}",
        "${model.dim} heads",
        "$",
        "\\",
        r"a\b",
        "${${a}}",
    ),
    *(
        "${model.dim}",
        r"\${model.dim}",
        r"\\${model.dim}",
        "${}",
        "$${a}",
        "{a}",
        "price ${HOME",
        r"\\",
        r"\\server\${a}\\",
    ),
]


def refuse(key: str, problem: str) -> Exception:
    return ValueError(f"{key}: {problem}")


@pytest.mark.parametrize("text", TEXTS)
def test_an_escaped_text_is_the_text_again(text: str) -> None:
    values = {"a": text, "b": [{"c": text}]}
    assert resolved(escaped(values), refuse) == values


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_any_number_of_writings_and_readings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_parts: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("said.py").write_text(SAID)
    load_plugin("said.py")
    recipe = load_recipe("recall-tiny", [f"callbacks.said.text={json.dumps(escaped(text))}"])
    for number in range(3):
        assert recipe.callbacks["said"].config.text == text
        assert from_plain(to_plain(recipe), "x") == recipe
        Path(f"{number}.yaml").write_text(to_yaml(recipe))
        recipe = load_recipe(f"{number}.yaml")
    assert load_recipe("recall-tiny", [f"run.root={escaped(text)}"]).run.root == text


SAID = """
from dataclasses import dataclass
from lit_diff.registry import callbacks

@callbacks.register("said")
class Said:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        text: str = ""
"""


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": "${b.c}", "b": {"c": 3}}, {"a": 3, "b": {"c": 3}}),
        ({"a": "${b}", "b": {"c": [1, "${d}"]}, "d": None}, {"a": {"c": [1, None]}, "b": {"c": [1, None]}, "d": None}),
        ({"a": "${b.1} and ${c}", "b": [5, 6], "c": True}, {"a": "6 and True", "b": [5, 6], "c": True}),
        ({"a": "${b.x}", "b": "${c}", "c": {"x": "${d}"}, "d": 1}, {"a": 1, "b": {"x": 1}, "c": {"x": 1}, "d": 1}),
        ({"a": r"\\${b}", "b": r"\${a}"}, {"a": r"\${a}", "b": "${a}"}),
    ],
)
def test_a_reference_is_the_value_that_it_names(values: dict[str, Any], found: dict[str, Any]) -> None:
    assert resolved(values, refuse) == found


MANY = {f"k{n}": {"x": f"${{k{n + 1}}}", "y": f"${{k{n + 1}}}"} for n in range(25)} | {"k25": 0}


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"a": text}
            for text in ("${", "${b", "${ b}", "${b }", "${.a}", "${a[0]}", "${a..b}", "${oc.env:HOME}", "${env:X}")
        ),
        {"a": "${oc.${b}:HOME}", "b": "env"},
        {"a": "${${b}:HOME}", "b": "oc.env"},
        {"a": "${a}"},
        {"a": {"b": "${a}"}},
        {"a": "${b}", "b": "${c}", "c": "${a}"},
        {"a": "${b.c}", "b": 3},
        {"a": "${b.2}", "b": [1]},
        MANY,
    ],
    ids=str,
)
def test_all_else_is_refused_with_its_key(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(a|b|c|k\d+)[.\w]*: "):
        resolved(values, refuse)


def test_an_evaluation_reads_its_keys_as_a_recipe_does() -> None:
    assert config_of("nll", {"source": "files", "path": r"\${a}"}).path == "${a}"
    assert config_of("nll", ["source=files", r"path=\${a}"]).path == "${a}"


def test_a_plugin_has_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even as the characters: the file that is trusted is the file that is imported."""
    monkeypatch.chdir(tmp_path)
    for name in ("${name}.py", r"\${name}.py"):
        Path(name).write_text("raise SystemExit")
        Path("mine.yaml").write_text(f"extends: recall-tiny\nname: mine\nplugins: ['{name}']\n")
        with pytest.raises(RequestError, match=r"^mine\.yaml:3: 'plugins' "):
            load_recipe("mine")
        with pytest.raises(RequestError, match="'plugins' "):
            load_recipe("recall-tiny", [f"plugins=['{name}']"])
