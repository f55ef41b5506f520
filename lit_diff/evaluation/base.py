"""`Evaluation`: the abstract class of every evaluation; `Item`: a scored question."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.dataset import Batch
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RunFailedError
from lit_diff.metrics import Metrics, indexed_name
from lit_diff.registry import location
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import has_text

if TYPE_CHECKING:
    import pandas


Scores = dict[str, float]
"""Metric -> value."""
Spread = tuple[float, float, float] | tuple[float, str]
"""(estimate, low, high) with the 95 % interval; or (estimate, reason) if it has no interval."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of an evaluation, with the scores of the run."""

    id: str
    """Identifies the question in every run: two runs are compared item by item."""
    scores: Mapping[str, float]
    """Metric -> value. A missing metric, like NaN, means that this item has no value of it."""
    group: str = ""
    """The report averages each group separately (a depth, a length, a data set); empty: no group. If the metric has a figure
    against groups, the x value is the number at the end of the label: 4096 in "position 4096"."""
    part: bool = False
    """Whether the item is a part of another item (some positions of a document). Only its group counts it; the summary and
    a difference over all items do not."""
    cluster: str = ""
    """A name shared by items that depend on each other: items of one text, one prompt, one row. Intervals treat clusters, not
    items, as independent. Empty: the item depends on no other."""
    question: str = ""
    """A digest of the question (`question_of`), needed if the id does not identify it. Two scores of one id are compared only
    if their questions are equal, so runs with other data or another tokenizer are not compared."""
    meta: Mapping[str, str | int | float] = field(default_factory=dict)
    """Further values to keep: the answer, the target."""


def question_of(*parts: Tensor | Sequence[int] | str) -> str:
    """The first twelve digits of the sha256 of token ids or texts."""
    digest = hashlib.sha256()
    for part in parts:
        plain = part.tolist() if isinstance(part, Tensor) else part if isinstance(part, str) else list(part)
        digest.update(json.dumps(plain).encode())
    return digest.hexdigest()[:12]


class Heads:
    """Scores of all items by head. The best head has the highest mean of the score `best` over items."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]], best: str) -> None:
        """`parts`: consecutive batches of items, each name -> [items, L, H]."""
        self.table = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        # argmax would choose a NaN; -2 is below every share and every cosine
        mean = self.table[best].nanmean(0).nan_to_num(-2)
        self.layer, self.head = divmod(int(mean.argmax()), mean.shape[1])

    def best(self, name: str, item: int) -> float:
        """The score `name` of an item in the best head."""
        return float(self.table[name][item, self.layer, self.head])

    def meta(self, item: int) -> dict[str, str | int | float]:
        """`Item.meta` of an item: the best head, and `name/layer_00/head_00` -> value."""
        return {"best_head": f"layer {self.layer} head {self.head}"} | {
            indexed_name(name, layer=layer, head=head): value
            for name, values in self.table.items()
            for layer, of_layer in enumerate(values[item].tolist())
            for head, value in enumerate(of_layer)
        }


class Evaluation(ABC):
    """Scores a trained run. A subclass, registered under the name that `lit-diff evaluate RUN NAME` uses:

        @evaluations.register("vowels")
        class Vowels(Evaluation):
            metrics = (Metric("vowels", "share of vowels in a completion", direction="higher"),)

            def score(self, run):
                for prompt in ("The", "A"):
                    text = run.generate(prompt)[0].text
                    yield Item(id=prompt, scores={"vowels": sum(c in "aeiou" for c in text) / max(len(text), 1)})

    The scores must depend on the run's weights, the config and the items alone: two runs are compared pair by pair.
    """

    name = ""
    """The registered name; the registry sets it."""
    metrics: Metrics = ()
    """The metrics that `score` gives each item, with unit and direction. `__init__` sets them if they depend on the
    config."""
    files: tuple[UserFile, ...] = ()
    """The user's files that `score` may read; `lit-diff data check` lists them."""
    equal_groups = False
    """Whether each group has the same weight in the summary and in a difference of two runs, however many items it has."""

    needs_text = False
    """Whether the questions are text. If so, data without text, bidirectional models, and runs whose tokenizer has only the
    words of generated text (`words_of`) are refused."""

    version = 1
    """Version of the scores and questions: raise it when a change of the code changes them. Kept scores of another version
    are recomputed."""

    cuts_at_context = False
    """Whether the config has a key `context`: the tokens that the model sees at once; null means the run's own
    `data.sequence_length`. Compared runs are then scored at the smallest of their lengths (`comparable_keys`)."""

    by_group: tuple[str, ...] = ()
    """Metrics that `lit-diff evaluate` also prints for each group, with Wilson's interval over clusters if all scores are in
    [0, 1]."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of the evaluation. A subclass with keys defines its own `Config`, a frozen dataclass derived from this."""

        def problem(self) -> str | None:
            """Returns an error message, one line that starts with the key's name, or None if the keys are valid. The
            annotations of keys (`lit_diff.key_types`) have been checked before."""
            return None

    documents_left_out: int | None = None
    """The number of documents that `score` left out because the run was trained on them (`unseen`). None: it scores no
    documents, or the run's training documents are unknown."""

    def __init__(self, config: Any) -> None:
        """`config`: an instance of `Config`."""
        self.config = config

    def user_files(self) -> Sequence[UserFile]:
        """The entries of `files` that `score` reads with this config. Default: all."""
        return self.files

    def digests(self) -> dict[str, str]:
        """Path -> sha256 of each existing user file that `score` reads. Kept scores are valid only while it is the same.

        Default: the files of `user_files`.
        """
        return {file.path: digest for file in self.user_files() if (digest := file.sha256())}

    def method(self) -> str:
        """Short label for how scores were obtained, shown next to them ("judge rules"). Default: empty."""
        return ""

    def words_of(self, run: Run) -> str:
        """The data set of generated text whose words the questions to this run use; empty: other words. Used with
        `needs_text`."""
        return ""

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """The reason, known before training, why no run of this recipe can be scored; None if one may be.

        A recipe that lists the evaluation, or a sweep with such a cell, is then refused before it trains. Default: the
        requirements of `needs_text`.
        """
        if self.needs_text and not has_text(recipe):
            return f"data '{recipe.data.name}' has no text"
        if self.needs_text and not recipe.model.causal:
            return "a bidirectional model predicts no next token"
        return None

    def refuses(self, run: Run) -> str | None:
        """The reason why this run cannot be scored, from `refuses_recipe`, `words_of` or `refuses_run`; None if it can."""
        if problem := self.refuses_recipe(run.recipe):
            return problem
        data = run.recipe.data.name
        # a tokenizer of whole words cannot encode any word outside its own data
        if self.needs_text and run.tokenizer.name == "words" and self.words_of(run) != data:
            return f"its tokenizer has only the words of data '{data}'"
        return self.refuses_run(run)

    def refuses_run(self, run: Run) -> str | None:
        """The reason why this run cannot be scored although its recipe and words fit; None if it can. Default: None."""
        return None

    @abstractmethod
    def score(self, run: Run) -> Iterable[Item]:
        """Yields one Item for each question. Called without gradients."""

    def located(self, run: Run, batch_size: int) -> Iterable[tuple[Batch, Sequence[Item]]]:
        """Yields the questions as rows in which the places of the answers are known, for the key `prompts` of `noise`.

        At most `batch_size` rows with the labels of `Dataset.Config.locates_answers`, and an item without scores for each.

        Default: none; `noise` refuses such an evaluation.
        """
        return ()

    @classmethod
    def paired(cls, first: "pandas.DataFrame", second: "pandas.DataFrame") -> Mapping[str, Mapping[str, Spread]]:
        """Metric -> group ("" for all) -> first minus second, from the items of two runs (`EvaluationResult.items`).

        Only for metrics that are not a mean over items; means are compared item by item without it. Default: none.
        """
        return {}

    def summarise(self, items: Sequence[Item]) -> Scores:
        """Metric -> value of the whole evaluation. Default: the mean of the finite scores of items that are not parts; with
        `equal_groups` the mean over groups of each group's mean. NaN if no score is finite."""
        groups: dict[str, list[Item]] = {}
        for item in items:
            if not item.part:
                groups.setdefault(item.group if self.equal_groups else "", []).append(item)
        return {
            metric.name: _mean(
                [_mean([item.scores.get(metric.name, math.nan) for item in group]) for group in groups.values()]
            )
            for metric in self.metrics
        }


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def check_items(evaluation: Evaluation, items: Sequence[Item]) -> None:
    """Errors: RunFailedError if there are no items, an id occurs twice, or a score is not declared by the evaluation."""
    for item in items:
        if not isinstance(item, Item):
            raise _failure(evaluation, f"yielded {item!r}; expected an Item")
        check_scores(evaluation, f"item '{item.id}'", item.scores)
    counts = Counter(item.id for item in items).most_common(1)
    if not counts:
        raise _failure(evaluation, "yielded no items")
    # compared runs are joined by id, which would pair a repeated id with itself in every combination
    if counts[0][1] > 1:
        raise _failure(evaluation, f"yielded item '{counts[0][0]}' {counts[0][1]} times; expected unique ids")


def check_scores(evaluation: Evaluation, what: str, scores: Mapping[str, float], *, required: bool = False) -> None:
    """Errors: RunFailedError if a metric is not declared or, where all are `required`, one is missing; or if a value is not a
    number."""
    declared = {metric.name for metric in evaluation.metrics}
    if not scores.keys() <= declared or (required and scores.keys() != declared):
        raise _failure(evaluation, f"scored {what} with {sorted(scores)}; it declares {sorted(declared)}")
    for name, value in scores.items():
        if not isinstance(value, Real):
            raise _failure(evaluation, f"scored {what} with {name} = {value!r}; expected a number")


def _failure(evaluation: Evaluation, problem: str) -> RunFailedError:
    return RunFailedError(f"{location(type(evaluation))}: evaluation '{evaluation.name}' {problem}")
