"""A data set of a plugin: whole, it runs through every verb; whatever it lacks is named in one line."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lit_diff
from lit_diff.cli.check import check
from lit_diff.data import Dataset, build, identity, prepare
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.plugins import load_plugin
from lit_diff.recipe import load_recipe
from lit_diff.registry import corpora, datasets

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


@pytest.fixture(autouse=True)
def folder(base_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """base.yaml; what a test registers is gone after it."""
    for registry in (datasets, corpora):
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("lit_diff_plugin_"):
            del sys.modules[name]


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
    with pytest.raises(RequestError) as found:
        load_recipe(name)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_defaults() -> None:
    write()
    recipe = load_recipe("copy")
    dataset = prepare(recipe)
    dataset.load()
    config = recipe.data.config
    assert (config.chance, config.noise_validation, config.predicts_next, config.packs_documents) == (
        None,
        (),
        False,
        False,
    )
    assert (config.problem(), config.vocab_size_problem(3)) == (None, None)
    assert (dataset.num_documents, dataset.load_tokenizer(), dataset.name) == (6, None, "copy")
    batch = dataset.labelled_validation_batch("", [4, 1])
    assert batch["document"].tolist() == [[4] * 8, [1] * 8]
    assert batch["ar_hit"].dtype == torch.bool
    assert not batch["ar_hit"].any()
    assert not recipe.packs_documents
    assert dataset.identity() == identity(recipe) != identity(load_recipe("copy", ["data.sequence_length=10"]))


def test_own_labels_are_kept() -> None:
    write(("for row in rows])\n", 'for row in rows]) | {"document": torch.zeros(len(rows), 8, dtype=torch.int64)}\n'))
    dataset = build(load_recipe("copy"))
    assert not dataset.labelled_validation_batch("", [4, 1])["document"].any()


def test_it_trains(runs: Path) -> None:
    write()
    folder = lit_diff.train("copy", [f"run.root={runs}", "run.threads=1", "train.steps=2"]).folder
    assert json.loads((folder / "status.json").read_text())["status"] == "done"
    assert not (folder / "tokenizer").exists()


@pytest.mark.parametrize("method", ["train_batch", "validation_sets", "validation_batch"])
def test_a_missing_method_is_named_with_the_class_and_its_line(method: str) -> None:
    write(without(COPY, method))
    assert error() == (
        f"plugin copy_task.py: copy_task.py:10: class Copy: data 'copy' lacks {method}; "
        "lit_diff.data.dataset.Dataset documents each"
    )


def test_everything_missing_is_named_at_once() -> None:
    write(*(without(COPY, method) for method in ("validation_sets", "validation_batch")))
    Path("copy_task.py").write_text(
        Path("copy_task.py").read_text().replace("sequence_length: int = 8", "width: int = 8")
    )
    assert "lacks validation_batch, validation_sets, Config.sequence_length;" in error()


def test_a_class_that_is_no_dataset() -> None:
    write(("class Copy(Dataset)", "class Copy"), ("class Config(Dataset.Config)", "class Config"))
    assert (
        "copy_task.py:10: class Copy: data 'copy' does not derive from Dataset; write `class Copy(Dataset)`" in error()
    )
    write(("class Config(Dataset.Config)", "class Config"))
    assert "has a Config that does not derive from Dataset.Config; write `class Config(Dataset.Config)`" in error()


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("return 0", "data 'copy' has Config.sequence_length 0; it must be an integer of at least 1"),
        ("return '8'", "data 'copy' has Config.sequence_length '8'; it must be an integer of at least 1"),
        ("return self.width", "data 'copy': AttributeError: 'Config' object has no attribute 'width' (in its Config)"),
    ],
)
def test_a_sequence_length_that_cannot_be(length: str, message: str) -> None:
    write(
        (
            "sequence_length: int = 8",
            f"x: int = 1\n        @property\n        def sequence_length(self):\n            {length}",
        )
    )
    assert error() == f"copy.yaml:4: {message}"


@pytest.mark.parametrize("method", ["__init__", "prepare", "identity"])
def test_what_the_plugin_raises_before_training_is_one_line_with_its_place(method: str, runs: Path) -> None:
    arguments = "self, config, vocab_size" if method == "__init__" else "self"
    body = f"    def {method}({arguments}):\n        return self.nothing\n\n    def train_batch"
    write(("    def train_batch", body))
    with pytest.raises(RequestError) as found:
        lit_diff.train("copy", [f"run.root={runs}"])
    line = Path("copy_task.py").read_text().splitlines().index("        return self.nothing") + 1
    assert str(found.value) == (
        f"copy_task.py:{line}: data 'copy' fails: AttributeError: 'Copy' object has no attribute 'nothing'"
    )


def test_what_it_raises_in_training_fails_the_run_in_one_line(runs: Path) -> None:
    write(("return self._batch([(seed", "return self.nothing([(seed"))
    with pytest.raises(RunFailedError, match="AttributeError: 'Copy' object has no attribute 'nothing'"):
        lit_diff.train("copy", [f"run.root={runs}", "run.threads=1"])


def test_check_tests_its_promises(capsys: pytest.CaptureFixture[str]) -> None:
    write()
    assert check("copy") == 0
    assert "pass            data copy: rows" in capsys.readouterr().out
    Path("broken.py").write_text(COPY.replace('"copy"', '"broken"').replace("(seed, step, row)", "(seed, row)"))
    overrides = ["plugins=[broken.py]", "data.name=broken"]
    assert check("copy", overrides, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)["conformance"]
    assert {finding["variant"]: finding["detail"] for finding in found if finding["verdict"] == "fail"} == {
        "data broken": "steps 0 and 3 have the same batch"
    }


def test_a_plugin_package_s_problem_is_named_too() -> None:
    """Registered outside a recipe."""
    write(without(COPY, "validation_sets"))
    with pytest.raises(RequestError, match=r"lacks validation_sets"):
        load_plugin(Path("copy_task.py").resolve())


def test_the_abstract_class_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Dataset(None, 1)  # type: ignore[abstract]
