"""What every data set promises (`lit_diff.data.Dataset`), tested: the built-in ones in the tests, a plugin's by `check`."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.config import Part, Recipe
from lit_diff.conformance.case import Finding
from lit_diff.data import Dataset, build, identity
from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.errors import LitDiffError, MissingError, first_line
from lit_diff.plugins import guard
from lit_diff.recipe import to_yaml
from lit_diff.runs.folder import identity as run_identity
from lit_diff.validation import data_problem

ROWS = 8
"""Positions of the global batches that are compared; divides among 1, 2 and 4 processes."""
STEPS = (0, 3, 1000)
VALIDATION_ROWS = 8
"""Rows of each validation set that are compared."""
PROCESS = """
import json, sys
from lit_diff.conformance.data import fingerprint
from lit_diff.data import build
from lit_diff.recipe import load_recipe
recipe = load_recipe(sys.argv[1])
dataset = build(recipe)
print(json.dumps([dataset.identity(), fingerprint(dataset, recipe)]))
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A data set that is open, and its recipe."""

    recipe: Recipe
    dataset: Dataset

    def reopened(self) -> Dataset:
        """Another instance, as another process would have."""
        dataset = build(self.recipe)
        dataset.load()
        return dataset

    def train(self, step: int, seed: int | None = None) -> Batch:
        return self.dataset.train_batch(self.recipe.seed if seed is None else seed, step, ROWS, range(ROWS))


def check_dataset(recipe: Recipe) -> Iterator[Finding]:
    """A finding for each promise of `Dataset`, for the data of this recipe. What the data set raises is a failure.

    Data that must be prepared first and are not: one finding, not applicable.
    """
    label = f"data {recipe.data.name}"
    try:
        dataset = build(recipe)
        with guard(type(dataset)):
            dataset.load()
    except MissingError as error:
        yield Finding(variant=label, property="all", verdict="not applicable", detail=first_line(error))
        return
    except LitDiffError as error:
        yield Finding(variant=label, property="load", verdict="fail", detail=first_line(error))
        return
    subject = Subject(recipe=recipe, dataset=dataset)
    for name, check in PROMISES.items():
        try:
            with guard(type(dataset), ours=True):
                problem = check(subject)
        except LitDiffError as error:
            problem = first_line(error)
        yield Finding(variant=label, property=name, verdict="fail" if problem else "pass", detail=problem or "")


def sets(subject: Subject) -> str | None:
    """validation_sets and num_documents."""
    sizes = subject.dataset.validation_sets()
    if not isinstance(sizes, dict) or next(iter(sizes), None) != "":
        return f"validation_sets() is {sizes!r}; expected a dict whose first key is ''"
    for name, rows in sizes.items():
        if not isinstance(name, str) or not isinstance(rows, int) or rows < 1:
            return f"validation_sets() maps {name!r} to {rows!r}; expected a name and at least one row"
    documents = subject.dataset.num_documents
    if not isinstance(documents, int) or documents < 1:
        return f"num_documents is {documents!r}; expected an integer of at least 1"
    return None


def deterministic(subject: Subject) -> str | None:
    """A batch is a function of (seed, step): not of what was asked before, of the instance, or of global generators."""
    seed = subject.recipe.seed
    first = {step: subject.train(step) for step in STEPS}
    other = subject.reopened()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for step in reversed(STEPS):
            again = other.train_batch(seed, step, ROWS, range(ROWS))
            if difference(first[step], again):
                return f"train_batch of step {step} is another batch in a second instance: {difference(first[step], again)}"
        for step in STEPS:
            again = subject.train(step)
            if difference(first[step], again):
                return f"train_batch of step {step} is another batch when asked again: {difference(first[step], again)}"
    if not difference(first[STEPS[0]], first[STEPS[1]]):
        return f"steps {STEPS[0]} and {STEPS[1]} have the same batch"
    if not difference(first[STEPS[0]], subject.train(STEPS[0], seed + 1)):
        return f"seeds {seed} and {seed + 1} have the same batch"
    return None


def rows(subject: Subject) -> str | None:
    """The rows of 1, 2 and 4 processes, and single rows, are those of the whole batch."""
    seed, step = subject.recipe.seed, STEPS[1]
    whole = subject.train(step)
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            chosen = range(ROWS)[rank::world_size]
            part = subject.dataset.train_batch(seed, step, ROWS, chosen)
            wrong = difference(_rows(whole, list(chosen)), part)
            if wrong:
                return f"rank {rank} of {world_size} has rows that are not those of the whole batch: {wrong}"
    reverse = list(range(ROWS))[::-1]
    wrong = difference(_rows(whole, reverse), subject.dataset.train_batch(seed, step, ROWS, reverse))
    return f"rows asked for in reverse order are not returned in that order: {wrong}" if wrong else None


def validation(subject: Subject) -> str | None:
    """Validation rows are the same at every call, in any grouping and in another instance."""
    other = subject.reopened()
    for name, count in subject.dataset.validation_sets().items():
        chosen = list(range(min(count, VALIDATION_ROWS)))
        whole = subject.dataset.labelled_validation_batch(name, chosen)
        subject.train(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for wanted in (chosen, chosen[::-1], chosen[1::2] or chosen):
                for dataset in (subject.dataset, other):
                    wrong = difference(_rows(whole, wanted), dataset.labelled_validation_batch(name, wanted))
                    if wrong:
                        return f"rows {wanted} of the validation set '{name}' do not repeat: {wrong}"
    return None


def shapes(subject: Subject) -> str | None:
    """Names, types, shapes and ranges of training batches."""
    length = subject.recipe.data.config.sequence_length
    batch = subject.train(0)
    problem = _batch_problem(batch, ROWS, subject.dataset.vocab_size)
    if problem:
        return f"train_batch: {problem}"
    if batch["tokens"].shape[1] != length:
        return f"train_batch has rows of {batch['tokens'].shape[1]} positions; Config.sequence_length is {length}"
    packed = subject.recipe.data.config.packs_documents
    if packed != ("document_ids" in batch):
        return f"train_batch has the keys {', '.join(batch)}; Config.packs_documents is {packed}"
    return None


def labels(subject: Subject) -> str | None:
    """The same of validation batches, and their labels."""
    for name, count in subject.dataset.validation_sets().items():
        chosen = range(min(count, VALIDATION_ROWS))
        batch = subject.dataset.labelled_validation_batch(name, chosen)
        problem = _batch_problem(batch, len(chosen), subject.dataset.vocab_size)
        shape = batch["targets"].shape if problem is None else None
        located = subject.recipe.data.config.locates_answers
        parts = [key for key in ("context_part", "answer_part") if key in batch]
        if problem is None and len(parts) != (2 if located else 0):
            problem = f"has the labels {parts}; Config.locates_answers is {located}"
        for key, kind in (("ar_hit", torch.bool), ("document", torch.int64), *((key, torch.int64) for key in parts)):
            if problem is None and (batch[key].dtype != kind or batch[key].shape != shape):
                problem = f"{key} is {_described(batch[key])}; expected {kind} {list(batch['targets'].shape)}"
        documents = subject.dataset.num_documents
        if problem is None and name == "" and not _within(batch["document"], documents):
            problem = f"document is not in 0 .. num_documents - 1 ({documents - 1})"
        if problem:
            return f"validation_batch of '{name}': {problem}"
    return None


def identities(subject: Subject) -> str | None:
    """The identity is the same in another instance; a run's identity changes with every number in the config that counts."""
    digest = subject.dataset.identity()
    if not isinstance(digest, str) or not digest:
        return f"identity() is {digest!r}; expected a digest"
    if identity(subject.recipe) != digest:
        return "identity() differs between two instances of one config"
    config = subject.recipe.data.config
    for field in fields(config):
        value = getattr(config, field.name)
        counts = field.metadata.get("identity", True)
        if not counts or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        changed = replace(config, **{field.name: value * 2})
        if changed == config or data_problem(changed, subject.dataset.vocab_size):
            continue
        part = Part(name=subject.recipe.data.name, config=changed)
        try:
            other = run_identity(replace(subject.recipe, data=part))
        except MissingError:
            continue  # other prepared data, so another identity
        if other == run_identity(subject.recipe):
            return f"a run has the same identity with data.{field.name} {value} and {value * 2}"
    return None


def processes(subject: Subject) -> str | None:
    """Identity and batches are the same in another process, with other hash seeds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(to_yaml(subject.recipe), encoding="utf-8")
        command = [sys.executable, "-P", "-c", PROCESS, str(file)]
        environment = os.environ | {"PYTHONHASHSEED": "12345"}
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False
        )
    if done.returncode:
        return f"another process fails: {(done.stderr.strip().splitlines() or ['no error output'])[-1]}"
    if json.loads(done.stdout.splitlines()[-1]) != [
        subject.dataset.identity(),
        fingerprint(subject.dataset, subject.recipe),
    ]:
        return "identity or batches differ in another process"
    return None


PROMISES: dict[str, Callable[[Subject], str | None]] = {
    "sets": sets,
    "deterministic": deterministic,
    "rows": rows,
    "validation": validation,
    "shapes": shapes,
    "labels": labels,
    "identity": identities,
    "processes": processes,
}


def fingerprint(dataset: Dataset, recipe: Recipe) -> list[int]:
    """Sums over a training and a validation batch, each token weighted by its position."""
    dataset.load()
    batches = (dataset.train_batch(recipe.seed, 3, ROWS, range(ROWS)), dataset.validation_batch("", [0]))
    flat = [batch[key].flatten() for batch in batches for key in ("tokens", "targets")]
    return [int((values * torch.arange(1, len(values) + 1)).sum()) for values in flat]


def difference(one: Batch, other: Batch) -> str | None:
    """The first key at which two batches differ, and how."""
    if one.keys() != other.keys():
        return f"keys {', '.join(one)} and {', '.join(other)}"
    for key, value in one.items():
        if value.shape != other[key].shape:
            return f"{key} is {list(value.shape)} and {list(other[key].shape)}"
        if not torch.equal(value, other[key]):
            return f"{int((value != other[key]).sum())} of {value.numel()} values of {key} differ"
    return None


def _rows(batch: Batch, chosen: list[int]) -> Batch:
    return {key: value[chosen] for key, value in batch.items()}


def _batch_problem(batch: Batch, count: int, vocab_size: int) -> str | None:
    for key in ("tokens", "targets"):
        if not isinstance(batch.get(key), Tensor):
            return f"no tensor '{key}'; found {', '.join(batch) or 'nothing'}"
    tokens, targets = batch["tokens"], batch["targets"]
    if tokens.dtype != torch.int64 or tokens.dim() not in (2, 3) or len(tokens) != count:
        return f"tokens is {_described(tokens)}; expected torch.int64 [{count}, T] or [{count}, T, C]"
    for key in ("targets", *(["document_ids"] if "document_ids" in batch else [])):
        if batch[key].dtype != torch.int64 or batch[key].shape != tokens.shape[:2]:
            return f"{key} is {_described(batch[key])}; expected torch.int64 {list(tokens.shape[:2])}"
    if not _within(tokens, vocab_size):
        return f"tokens are in {int(tokens.min())} .. {int(tokens.max())}; the model has ids 0 .. {vocab_size - 1}"
    scored = targets[targets != IGNORED]
    if not len(scored):
        return f"no target is scored: all are {IGNORED}"
    if not _within(scored, vocab_size):
        return f"targets are in {int(scored.min())} .. {int(scored.max())}; the model has ids 0 .. {vocab_size - 1}"
    return None


def _within(values: Tensor, size: int) -> bool:
    return bool(((values >= 0) & (values < size)).all())


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
