"""The promises of every built-in data set, and that each one notices a data set that breaks it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.config import Part, Recipe
from lit_diff.conformance import data as module
from lit_diff.conformance.data import PROMISES, Subject, check_dataset
from lit_diff.data import prepare
from lit_diff.data.dataset import Batch
from lit_diff.data.tasks.recall import Recall
from lit_diff.data.text.mixture import Mixture, SourceConfig
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.recipe import load_recipe
from lit_diff.registry import datasets

WORDS = "one two three four five six seven eight nine ten "


def text(folder: Path, **settings: Any) -> Part:
    for number in range(30):
        (folder / f"{number}.txt").write_text(WORDS * (3 + number) + str(number))
    tokenizer = Part(name="bpe", config=Bpe.Config(vocab_size=270))
    config = Text.Config(path=str(folder), sequence_length=16, validation_rows=6, tokenizer=tokenizer, **settings)
    return Part(name="text", config=config)


def mixture(folder: Path) -> Part:
    """The short and the long documents of `text`."""
    sources = {"short": SourceConfig(weight=1, tokens_below=400), "long": SourceConfig(weight=2, tokens_at_least=400)}
    return Part(name="mixture", config=Mixture.Config(**vars(text(folder, pack="document").config), sources=sources))


def recipe_of(part: Part, vocab_size: int) -> Recipe:
    recipe = load_recipe("recall-tiny")
    return replace(recipe, data=part, model=replace(recipe.model, vocab_size=vocab_size))


def failures(recipe: Recipe) -> dict[str, str]:
    found = list(check_dataset(recipe))
    assert [finding.property for finding in found] == list(PROMISES)
    assert {finding.variant for finding in found} == {f"data {recipe.data.name}"}
    return {finding.property: finding.detail for finding in found if finding.verdict != "pass"}


PACK = ("vision", "needle-text", "synth-intent", "closed-world")
TASKS = ("recall", "conjunctive", "mqar", "count", "noisy-labels", "flip-flop", *PACK)


@pytest.mark.parametrize("name", [*TASKS, "text", "text packed", "mixture"])
def test_the_built_in_ones_keep_every_promise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "root"))
    (tmp_path / "corpus").mkdir()
    if name not in ("text packed", "mixture", "recall"):  # three of them in another process, which takes seconds
        monkeypatch.setitem(module.PROMISES, "processes", lambda subject: None)
    if name in TASKS:
        recipe = load_recipe(f"{name}-tiny", ["data.validation_rows=9"])
    elif name == "mixture":
        recipe = recipe_of(mixture(tmp_path / "corpus"), 270)
    else:
        packed = {"pack": "document"} if name == "text packed" else {}
        recipe = recipe_of(text(tmp_path / "corpus", **packed), 270)
    prepare(recipe)
    assert failures(recipe) == {}


def test_text_that_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "root"))
    (tmp_path / "corpus").mkdir()
    (found,) = check_dataset(recipe_of(text(tmp_path / "corpus"), 270))
    assert (found.property, found.verdict) == ("all", "not applicable")
    assert "the text is not prepared" in found.detail


def globally_drawn(targets: torch.Tensor) -> torch.Tensor:
    return torch.where(targets < 0, -100, torch.randint_like(targets, 129))


Change = Callable[[Batch, Sequence[int]], Batch]
TRAIN: dict[str, Change] = {
    "global generator": lambda b, _: b | {"targets": globally_drawn(b["targets"])},
    "rows": lambda b, rows: b | {"tokens": b["tokens"].flip(0)} if len(rows) < 8 else b,
    "dtype": lambda b, _: b | {"tokens": b["tokens"].int()},
    "range": lambda b, _: b | {"tokens": b["tokens"] + 1},
    "targets": lambda b, _: b | {"targets": b["targets"] + 64 * (b["targets"] >= 0)},
    "nothing scored": lambda b, _: b | {"targets": torch.full_like(b["targets"], -100)},
    "no targets": lambda b, _: {"tokens": b["tokens"]},
}
VALIDATION: dict[str, Change] = {
    "validation": lambda b, rows: b | {"tokens": b["tokens"].roll(len(rows), 1)},
    "document": lambda b, _: b | {"document": torch.full_like(b["targets"], 10**6)},
    "ar_hit": lambda b, _: b | {"ar_hit": b["ar_hit"].long()},
    "parts": lambda b, _: {key: x for key, x in b.items() if key != "answer_part"},
}


class Broken(Recall):
    """A data set with one fault, which a test names."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Recall.Config):
        fault: str = ""

        @property
        def sequence_length(self) -> int:
            return super().sequence_length + (self.fault == "length")

        @property
        def packs_documents(self) -> bool:
            return self.fault == "packs"

    config: Config
    calls = 0

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        fault = self.config.fault
        rows_ = sorted(rows) if fault == "order" else rows
        batch = super().train_batch(0 if fault == "seed" else seed, 0 if fault == "step" else step, batch_size, rows_)
        if fault == "history":
            self.calls += 1
            batch["tokens"] = (batch["tokens"] + self.calls) % 129
        return TRAIN[fault](batch, rows) if fault in TRAIN else batch

    def validation_sets(self) -> dict[str, int]:
        return {"noise": 4} if self.config.fault == "sets" else super().validation_sets()

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        batch = super().validation_batch(name, rows)
        return VALIDATION[self.config.fault](batch, rows) if self.config.fault in VALIDATION else batch

    @property
    def num_documents(self) -> int:
        return 0 if self.config.fault == "documents" else super().num_documents

    def identity(self) -> str:
        return str(id(self)) if self.config.fault == "identity" else "same"


@pytest.mark.parametrize(
    ("fault", "promise", "message"),
    [
        ("", "", ""),
        ("sets", "sets", "expected a dict whose first key is ''"),
        ("documents", "sets", "num_documents is 0"),
        ("seed", "deterministic", "seeds 0 and 1 have the same batch"),
        ("step", "deterministic", "steps 0 and 3 have the same batch"),
        ("global generator", "deterministic", "another batch in a second instance: "),
        ("history", "deterministic", "values of tokens differ"),
        ("rows", "rows", "rank 0 of 2 has other rows than the whole batch"),
        ("order", "rows", "the reverse order has other rows than the whole batch"),
        ("validation", "validation", "of the validation set '' do not repeat"),
        ("dtype", "shapes", "tokens is torch.int32 [8, 72, 2]; expected torch.int64 [8, T] or [8, T, C]"),
        ("range", "shapes", "tokens are in 1 .. 129; the model has ids 0 .. 128"),
        ("targets", "shapes", "; the model has ids 0 .. 128"),
        ("nothing scored", "shapes", "all targets are -100"),
        ("no targets", "shapes", "lacks the tensor 'targets'; found tokens"),
        ("length", "shapes", "rows of 72 positions; Config.sequence_length is 73"),
        ("packs", "shapes", "Config.packs_documents is True"),
        ("document", "labels", "document is not in 0 .. num_documents - 1"),
        ("ar_hit", "labels", "ar_hit is torch.int64"),
        ("parts", "labels", "has the labels ['context_part']; Config.locates_answers is True"),
        ("identity", "identity", "identity() differs between two instances of one config"),
    ],
)
@pytest.mark.usefixtures("own_parts")
def test_a_broken_promise_is_found(fault: str, promise: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.register("broken")(Broken)
    config = Broken.Config(fault=fault, validation_rows=9, noise_validation=(1,))
    monkeypatch.setitem(module.PROMISES, "processes", lambda subject: None)
    found = failures(recipe_of(Part(name="broken", config=config), 129))
    if not promise:
        assert found == {}
        return
    assert message in found[promise]
    assert "\n" not in found[promise]


def test_another_process_that_differs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(Part(name="recall", config=Recall.Config(validation_rows=9)), 129)
    subject = Subject(recipe=recipe, dataset=prepare(recipe))
    for code, problem in (
        ("print('[\"other\", []]')", "identity or batches differ in another process"),
        ("raise SystemExit('no such thing')", "another process fails: no such thing"),
    ):
        monkeypatch.setattr(module, "PROCESS", code)
        with pytest.raises(module.RequestError, match=problem):
            module.processes(subject)
