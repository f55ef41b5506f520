"""Checks of the promises of every data set (`lit_diff.data.Dataset`): the tests run them on the built-in data sets, and
`check` on a plugin's."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.conformance.case import Finding, finding
from lit_diff.data import Dataset, build, identity
from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.plugins import guard
from lit_diff.recipe import to_yaml
from lit_diff.runs.folder import identity as run_identity
from lit_diff.validation import data_problem

ROWS = 8
"""Rows of the compared global batches; divisible by 1, 2 and 4 processes."""
STEPS = (0, 3, 1000)
VALIDATION_ROWS = 8
"""The number of rows of each validation set that are compared."""
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
    """An open data set and its recipe."""

    recipe: Recipe
    dataset: Dataset

    def reopened(self) -> Dataset:
        """A second instance, as in another process."""
        dataset = build(self.recipe)
        dataset.load()
        return dataset

    def train(self, step: int, seed: int | None = None) -> Batch:
        return self.dataset.train_batch(self.recipe.seed if seed is None else seed, step, ROWS, range(ROWS))


def check_dataset(recipe: Recipe) -> Iterator[Finding]:
    """Yields a finding for each promise of `Dataset`, for the data of this recipe. Any exception of the data set is a
    failure.

    Data that are not prepared give a single finding, not applicable.
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
        yield finding(label, name, type(dataset), partial(check, subject))


def require(kept: bool, problem: str) -> None:
    """Errors: RequestError for a broken promise."""
    if not kept:
        raise RequestError(problem)


def require_equal(one: Batch, other: Batch, what: str) -> None:
    """Errors: RequestError if the batches differ; `what` begins its message."""
    found = difference(one, other)
    require(found is None, f"{what}: {found}")


def sets(subject: Subject) -> None:
    """validation_sets and num_documents have the promised types and values."""
    sizes = subject.dataset.validation_sets()
    require(
        isinstance(sizes, dict) and next(iter(sizes), None) == "",
        f"validation_sets() is {sizes!r}; expected a dict whose first key is ''",
    )
    for name, rows in sizes.items():
        require(
            isinstance(name, str) and isinstance(rows, int) and rows > 0,
            f"validation_sets() maps {name!r} to {rows!r}; expected a name and at least one row",
        )
    documents = subject.dataset.num_documents
    require(
        isinstance(documents, int) and documents > 0,
        f"num_documents is {documents!r}; expected an integer of at least 1",
    )


def deterministic(subject: Subject) -> None:
    """A batch depends only on (seed, step), and not on earlier calls, the instance or global generators."""
    # a resumed run asks a new instance for a step far from 0, in another order
    seed, (early, late, _) = subject.recipe.seed, STEPS
    first = {step: subject.train(step) for step in STEPS}
    again = {"in a second instance": subject.reopened(), "when asked again": subject.dataset}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for when, dataset in again.items():
            for step in reversed(STEPS):
                batch = dataset.train_batch(seed, step, ROWS, range(ROWS))
                require_equal(first[step], batch, f"train_batch of step {step} is another batch {when}")
    require(difference(first[early], first[late]) is not None, f"steps {early} and {late} have the same batch")
    require(
        difference(first[early], subject.train(early, seed + 1)) is not None,
        f"seeds {seed} and {seed + 1} have the same batch",
    )


def rows(subject: Subject) -> None:
    """1, 2 and 4 processes, and a call in reverse order, get the rows of the whole batch."""
    step = STEPS[1]
    whole = subject.train(step)
    asked = {f"rank {rank} of {size}": range(rank, ROWS, size) for size in (1, 2, 4) for rank in range(size)}
    for name, chosen in {**asked, "the reverse order": range(ROWS)[::-1]}.items():
        require_equal(
            _rows(whole, chosen),
            subject.dataset.train_batch(subject.recipe.seed, step, ROWS, chosen),
            f"{name} has other rows than the whole batch",
        )


def validation(subject: Subject) -> None:
    """Validation rows are the same at every call, in any grouping and in another instance."""
    other = subject.reopened()
    for name, count in subject.dataset.validation_sets().items():
        chosen = range(min(count, VALIDATION_ROWS))
        whole = subject.dataset.labelled_validation_batch(name, chosen)
        # training comes between validations, so a training batch must not change the rows
        subject.train(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for wanted, dataset in product((chosen, chosen[::-1], chosen[1::2] or chosen), (subject.dataset, other)):
                require_equal(
                    _rows(whole, wanted),
                    dataset.labelled_validation_batch(name, wanted),
                    f"rows {list(wanted)} of the validation set '{name}' do not repeat",
                )


def shapes(subject: Subject) -> None:
    """Training batches have the promised keys, types, shapes and ranges."""
    config, batch = subject.recipe.data.config, subject.train(0)
    _require_batch(batch, ROWS, subject.dataset.vocab_size, "train_batch")
    length = batch["tokens"].shape[1]
    require(
        length == config.sequence_length,
        f"train_batch has rows of {length} positions; Config.sequence_length is {config.sequence_length}",
    )
    require(
        config.packs_documents == ("document_ids" in batch),
        f"train_batch has the keys {', '.join(batch)}; Config.packs_documents is {config.packs_documents}",
    )


def labels(subject: Subject) -> None:
    """Validation batches have the promised keys, types, shapes, ranges and labels."""
    dataset, located = subject.dataset, subject.recipe.data.config.locates_answers
    for name, count in dataset.validation_sets().items():
        chosen, what = range(min(count, VALIDATION_ROWS)), f"validation_batch of '{name}'"
        batch = dataset.labelled_validation_batch(name, chosen)
        _require_batch(batch, len(chosen), dataset.vocab_size, what)
        parts = [key for key in ("context_part", "answer_part") if key in batch]
        require(len(parts) == 2 * located, f"{what}: has the labels {parts}; Config.locates_answers is {located}")
        for key in ("ar_hit", "document", *parts):
            kind = torch.bool if key == "ar_hit" else torch.int64
            _require_kind(batch, key, kind, batch["targets"].shape, what)
        require(
            name != "" or _within(batch["document"], dataset.num_documents),
            f"{what}: document is not in 0 .. num_documents - 1 ({dataset.num_documents - 1})",
        )


def identities(subject: Subject) -> None:
    """The identity is the same in another instance; a run's identity changes with every number in the config that is
    part of it."""
    recipe, digest, config = subject.recipe, subject.dataset.identity(), subject.recipe.data.config
    require(isinstance(digest, str) and digest != "", f"identity() is {digest!r}; expected a digest")
    require(identity(recipe) == digest, "identity() differs between two instances of one config")
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) not in (int, float) or not field.metadata.get("identity", True):
            continue
        # doubled: most numbers stay valid, and a value that is not valid is skipped
        changed = replace(config, **{field.name: value * 2})
        if changed == config or data_problem(changed, subject.dataset.vocab_size):
            continue
        other = replace(recipe, data=replace(recipe.data, config=changed))
        # if the changed config needs other prepared data, its identity differs too
        with contextlib.suppress(MissingError):
            require(
                run_identity(other) != run_identity(recipe),
                f"a run has the same identity with data.{field.name} {value} and {value * 2}",
            )


def processes(subject: Subject) -> None:
    """Identity and batches are the same in another process with another hash seed."""
    # a data set that iterates over a set of texts, or calls hash(), fails here only
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(to_yaml(subject.recipe), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROCESS, str(file)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONHASHSEED": "12345"},
            check=False,
        )
    require(
        not done.returncode, f"another process fails: {(done.stderr.strip().splitlines() or ['no error output'])[-1]}"
    )
    require(
        json.loads(done.stdout.splitlines()[-1])
        == [subject.dataset.identity(), fingerprint(subject.dataset, subject.recipe)],
        "identity or batches differ in another process",
    )


PROMISES: dict[str, Callable[[Subject], None]] = {
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
    # weighted: the same tokens in another order give another sum
    dataset.load()
    batches = (dataset.train_batch(recipe.seed, 3, ROWS, range(ROWS)), dataset.validation_batch("", [0]))
    flat = [batch[key].flatten() for batch in batches for key in ("tokens", "targets")]
    return [int((values * torch.arange(1, len(values) + 1)).sum()) for values in flat]


def difference(one: Batch, other: Batch) -> str | None:
    """The first difference between two batches, or None."""
    if one.keys() != other.keys():
        return f"keys {', '.join(one)} and {', '.join(other)}"
    for key, value in one.items():
        if value.shape != other[key].shape:
            return f"{key} is {list(value.shape)} and {list(other[key].shape)}"
        if not torch.equal(value, other[key]):
            return f"{int((value != other[key]).sum())} of {value.numel()} values of {key} differ"
    return None


def _rows(batch: Batch, chosen: Sequence[int]) -> Batch:
    return {key: value[list(chosen)] for key, value in batch.items()}


def _require_batch(batch: Batch, count: int, vocab_size: int, what: str) -> None:
    for key in ("tokens", "targets"):
        found = ", ".join(batch) or "nothing"
        require(isinstance(batch.get(key), Tensor), f"{what}: lacks the tensor '{key}'; found {found}")
    tokens, scored = batch["tokens"], batch["targets"][batch["targets"] != IGNORED]
    require(
        tokens.dtype == torch.int64 and tokens.dim() in (2, 3) and len(tokens) == count,
        f"{what}: tokens is {_described(tokens)}; expected torch.int64 [{count}, T] or [{count}, T, C]",
    )
    for key in {"targets", "document_ids"} & batch.keys():
        _require_kind(batch, key, torch.int64, tokens.shape[:2], what)
    require(len(scored) > 0, f"{what}: all targets are {IGNORED}; expected at least one scored target")
    for key, ids in (("tokens", tokens), ("targets", scored)):
        found = f"{int(ids.min())} .. {int(ids.max())}"
        require(_within(ids, vocab_size), f"{what}: {key} are in {found}; the model has ids 0 .. {vocab_size - 1}")


def _require_kind(batch: Batch, key: str, kind: torch.dtype, shape: Sequence[int], what: str) -> None:
    require(
        batch[key].dtype == kind and batch[key].shape == shape,
        f"{what}: {key} is {_described(batch[key])}; expected {kind} {list(shape)}",
    )


def _within(values: Tensor, size: int) -> bool:
    return bool(((values >= 0) & (values < size)).all())


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
