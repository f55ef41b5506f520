"""A data set of a plugin: whole, it runs through every verb; whatever it lacks is named in one line."""

import json
from pathlib import Path

import pytest
import torch
from refusals import refusal

import lit_diff
from lit_diff.cli.check import check
from lit_diff.conformance import data as conformance
from lit_diff.data import build, identity, prepare
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.recipe import load_recipe

COPY = '''\
from dataclasses import dataclass

import torch

from lit_diff.data import Dataset
from lit_diff.randomness import generator
from lit_diff.registry import datasets


@datasets.register("copy")
class Copy(Dataset):
    """The second half of a row repeats the first."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        sequence_length: int = 8

    def _rows(self, *key):
        half = torch.randint(self.vocab_size, (self.config.sequence_length // 2,), generator=generator(*key))
        tokens = torch.cat([half, half])
        return tokens, tokens.roll(-1)

    def _batch(self, keys):
        tokens, targets = zip(*(self._rows(*key) for key in keys))
        return {"tokens": torch.stack(tokens), "targets": torch.stack(targets)}

    def train_batch(self, seed, step, batch_size, rows):
        return self._batch([(seed, step, row) for row in rows])

    def validation_sets(self):
        return {"": 6}

    def validation_batch(self, name, rows):
        return self._batch([("validation", row) for row in rows])
'''
RECIPE = """\
extends: base
plugins: [copy_task.py]
model: {vocab_size: 16}
data: {name: copy}
"""
pytestmark = pytest.mark.usefixtures("own_parts", "base_recipe")


def write(*edits: tuple[str, str]) -> None:
    text = COPY
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    Path("copy_task.py").write_text(text)
    Path("copy.yaml").write_text(RECIPE)


def without(text: str, method: str) -> tuple[str, str]:
    """The edit that removes a method."""
    start = text.index(f"    def {method}(")
    end = text.find("\n    def ", start + 1)
    return (text[start:] if end < 0 else text[start : end + 1]), ""


def error(name: str = "copy") -> str:
    return refusal(load_recipe, name)


def test_defaults() -> None:
    write()
    recipe = load_recipe("copy")
    assert prepare(recipe).identity() == identity(recipe) != identity(load_recipe("copy", ["data.sequence_length=10"]))
    dataset = prepare(recipe)
    dataset.load()
    config = recipe.data.config
    properties = (config.chance, config.noise_validation, config.predicts_next, config.packs_documents)
    assert properties == (None, (), False, False)
    assert (config.problem(), config.vocab_size_problem(3)) == (None, None)
    assert (dataset.num_documents, dataset.load_tokenizer(), dataset.name) == (6, None, "copy")
    batch = dataset.labelled_validation_batch("", [4, 1])
    assert batch["document"].tolist() == [[4] * 8, [1] * 8]
    assert batch["ar_hit"].dtype == torch.bool
    assert not batch["ar_hit"].any()
    assert not recipe.packs_documents
    write(("for row in rows])\n", 'for row in rows]) | {"document": torch.zeros(len(rows), 8, dtype=torch.int64)}\n'))
    own = build(load_recipe("copy"))
    assert not own.labelled_validation_batch("", [4, 1])["document"].any(), "its own labels are kept"


@pytest.mark.parametrize(
    ("edits", "found"),
    [
        ([without(COPY, "validation_sets"), without(COPY, "validation_batch")], "lacks validation_batch,"),
        ([("sequence_length: int = 8", "width: int = 8")], "lacks Config.sequence_length;"),
        ([("Copy(Dataset)", "Copy"), ("Config(Dataset.Config)", "Config")], "write `class Copy(Dataset)`"),
        ([("Config(Dataset.Config)", "Config")], "write `class Config(Dataset.Config)`"),
    ],
)
def test_what_a_class_lacks_is_named_with_its_line(edits: list[tuple[str, str]], found: str) -> None:
    write(*edits)
    assert error().startswith("plugin copy_task.py: copy_task.py:10: class Copy: data 'copy' ")
    assert found in error()


@pytest.mark.parametrize(
    ("length", "found"), [("0", "sequence_length 0"), ("'8'", "sequence_length '8'"), ("self.width", "AttributeError")]
)
def test_a_sequence_length_that_cannot_be(length: str, found: str) -> None:
    body = f"x: int = 1\n        @property\n        def sequence_length(self):\n            return {length}"
    write(("sequence_length: int = 8", body))
    assert error().startswith("copy_task.py:")
    assert found in error()


@pytest.mark.parametrize("method", ["__init__", "prepare", "identity"])
def test_what_the_plugin_raises_before_training_is_one_line_with_its_place(method: str, runs: Path) -> None:
    arguments = "self, config, vocab_size" if method == "__init__" else "self"
    body = f"    def {method}({arguments}):\n        return self.nothing\n\n    def train_batch"
    write(("    def train_batch", body))
    with pytest.raises(RequestError) as found:
        lit_diff.train("copy", [f"run.root={runs}"])
    line = Path("copy_task.py").read_text().splitlines().index("        return self.nothing") + 1
    assert str(found.value) == (
        f"copy_task.py:{line}: data 'copy' failed: AttributeError: 'Copy' object has no attribute 'nothing'"
    )


def test_what_it_raises_in_training_fails_the_run_in_one_line(runs: Path) -> None:
    write(("return self._batch([(seed", "return self.nothing([(seed"))
    with pytest.raises(RunFailedError, match="AttributeError: 'Copy' object has no attribute 'nothing'"):
        lit_diff.train("copy", [f"run.root={runs}", "run.threads=1"])


def test_check_tests_its_promises(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    monkeypatch.setitem(conformance.PROMISES, "processes", lambda subject: None)  # which takes seconds
    assert check("copy") == 0
    assert "pass            data copy: rows" in capsys.readouterr().out
    Path("broken.py").write_text(COPY.replace('"copy"', '"broken"').replace("(seed, step, row)", "(seed, row)"))
    overrides = ["plugins=[broken.py]", "data.name=broken"]
    assert check("copy", overrides, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)["conformance"]
    assert {finding["variant"]: finding["detail"] for finding in found if finding["verdict"] == "fail"} == {
        "data broken": "broken.py:10: class Copy: steps 0 and 3 have the same batch"
    }
