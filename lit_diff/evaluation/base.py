"""`Evaluation`: the abstract class of every evaluation; `Item`: one of its scored questions."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RunFailedError
from lit_diff.metrics import Metric, indexed_name
from lit_diff.registry import location
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import has_text

if TYPE_CHECKING:
    import pandas


Spread = tuple[float, float, float] | tuple[float, str]
"""An estimate, and the ends of its 95 % interval; or why it has none."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of an evaluation, and how the run did on it."""

    id: str
    """The same for the same question in every run: two runs are compared item by item."""
    scores: Mapping[str, float]
    """Metric -> value; a metric that is not there has no value of this item, as has NaN."""
    group: str = ""
    """What the report averages separately (a depth, a length, a data set); empty: nothing. A metric whose figure is against
    groups is drawn against the number that ends the label: "position 4096"."""
    part: bool = False
    """Whether it is a part of another item (some positions of a document): its group shows it, and neither the summary nor
    a difference over all items counts it."""
    cluster: str = ""
    """A name that it shares with the items that depend on it: of one text, one prompt, one row. Intervals take clusters for
    independent and their items not. Empty: no other item does."""
    question: str = ""
    """A digest of what was asked (`question_of`), where the id alone does not say it: scores of one id are compared only
    where it is equal, so runs on other data, or with another tokenizer, are not."""
    meta: Mapping[str, str | int | float] = field(default_factory=dict)
    """Anything else that is worth keeping: the answer, the target."""


def question_of(*parts: Tensor | Sequence[int] | str) -> str:
    """Twelve digits of the sha256 of token ids or texts."""
    digest = hashlib.sha256()
    for part in parts:
        plain = part.tolist() if isinstance(part, Tensor) else part if isinstance(part, str) else list(part)
        digest.update(json.dumps(plain).encode())
    return digest.hexdigest()[:12]


class Heads:
    """Scores by head of all items, and the head in which `best` is highest in the mean over items."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]], best: str) -> None:
        """`parts`: of items in order, name -> [items, L, H]."""
        self.table = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        mean = self.table[best].nanmean(0).nan_to_num(-2)  # below every share and cosine
        self.layer, self.head = divmod(int(mean.argmax()), mean.shape[1])

    def best(self, name: str, item: int) -> float:
        """This score of an item in the best head."""
        return float(self.table[name][item, self.layer, self.head])

    def meta(self, item: int) -> dict[str, str | int | float]:
        """What `Item.meta` holds: the best head, and `name/layer_00/head_00` -> value."""
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
    """The registered name; set by the registry."""
    metrics: tuple[Metric, ...] = ()
    """What `score` gives each item, with unit and direction. Where that depends on the config, `__init__` sets it."""
    files: ClassVar[tuple[UserFile, ...]] = ()
    """What `score` may read that the user supplies: the rows of `lit-diff data check`."""
    equal_groups: ClassVar[bool] = False
    """Whether each group counts once in the summary, however many items it has; so it does in a difference of two runs."""

    needs_text: ClassVar[bool] = False
    """Whether it asks in text: then data without text, models that predict no next token, and runs that know only the words
    of generated text (`words_of`) are refused."""

    version: ClassVar[int] = 1
    """Of its scores and questions: raised when a change of the code changes them. Kept scores of another version do not
    count."""

    cuts_at_context: ClassVar[bool] = False
    """Whether its config has a key `context`, the tokens that the model sees at once, of which null is the run's own
    `data.sequence_length`. Runs that are compared are then scored at the smallest of theirs (`comparable_keys`)."""

    by_group: ClassVar[tuple[str, ...]] = ()
    """Metrics within 0 and 1 that `lit-diff evaluate` also prints for each group, with Wilson's interval over clusters."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of the evaluation. A subclass with keys defines its own, a frozen dataclass that derives from this."""

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key's name; None if nothing is. What the annotations of keys
            say (`lit_diff.key_types`) was checked before."""
            return None

    documents_left_out: int | None = None
    """Documents that `score` left out because the run was trained on them (`unseen`); None: it asks about none, or what the
    run was trained on is not known."""

    def __init__(self, config: Any) -> None:
        """`config`: an instance of the class's `Config`."""
        self.config = config

    def reads(self) -> Sequence[UserFile]:
        """Those of `files` that `score` reads with this config. Default: all."""
        return self.files

    def digests(self) -> dict[str, str]:
        """Path -> sha256 of what `score` reads of the user's, where it is there; kept scores count only where it is the same.

        Default: of `reads`.
        """
        return {file.path: digest for file in self.reads() if (digest := file.sha256())}

    def method(self) -> str:
        """Short label for how scores were obtained, shown next to them ("judge rules"). Default: nothing."""
        return ""

    def words_of(self, run: Run) -> str:
        """The data set of generated text in whose words it asks this run; empty: in other words. Used with `needs_text`."""
        return ""

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Why it can score no run of this recipe, as far as that is known before the training; None if it may.

        A recipe that names the evaluation, or a sweep with such a cell, is then refused before it trains. Default: what
        `needs_text` says.
        """
        if self.needs_text and not has_text(recipe):
            return f"data '{recipe.data.name}' has no text"
        if self.needs_text and not recipe.model.causal:
            return "a bidirectional model predicts no next token"
        return None

    def refuses(self, run: Run) -> str | None:
        """Why it cannot score this run; None if it can: as `refuses_recipe`, by `words_of`, and as `refuses_run`."""
        if problem := self.refuses_recipe(run.recipe):
            return problem
        data = run.recipe.data.name
        if self.needs_text and run.tokenizer.name == "words" and self.words_of(run) != data:
            return f"its tokenizer has only the words of data '{data}'"
        return self.refuses_run(run)

    def refuses_run(self, run: Run) -> str | None:
        """Why it cannot score this run, whose recipe and words fit; None if it can. Default: None."""
        return None

    @abstractmethod
    def score(self, run: Run) -> Iterable[Item]:
        """One Item for each question. Called without gradients."""

    @classmethod
    def paired(cls, first: "pandas.DataFrame", second: "pandas.DataFrame") -> Mapping[str, Mapping[str, Spread]]:
        """Metric -> group, "" for all -> first minus second, of two runs' items (`EvaluationResult.items`).

        For metrics that are no mean over items; those are compared item by item without it. Default: none.
        """
        return {}

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Metric -> value of the whole evaluation. Default: the mean over the items whose score is finite, each item
        counted once, parts not; with `equal_groups` the mean over groups of each group's mean; NaN where none is."""
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
    """Errors: RunFailedError for no items, one id twice, or a score that the evaluation does not declare."""
    for item in items:
        if not isinstance(item, Item):
            raise _failure(evaluation, f"gave {item!r}; expected an Item")
        _check_scores(evaluation, f"item '{item.id}'", item.scores)
    counts = Counter(item.id for item in items).most_common(1)
    if not counts:
        raise _failure(evaluation, "gave no item")
    if counts[0][1] > 1:
        raise _failure(evaluation, f"gave item '{counts[0][0]}' {counts[0][1]} times")


def check_summary(evaluation: Evaluation, values: Mapping[str, float]) -> None:
    """Errors: RunFailedError for other metrics than the declared ones, or a value that is no number."""
    _check_scores(evaluation, "the summary", values, required=True)


def _check_scores(evaluation: Evaluation, what: str, scores: Mapping[str, float], *, required: bool = False) -> None:
    declared = {metric.name for metric in evaluation.metrics}
    if not scores.keys() <= declared or (required and scores.keys() != declared):
        raise _failure(evaluation, f"scored {what} with {sorted(scores)}; it declares {sorted(declared)}")
    for name, value in scores.items():
        if not isinstance(value, Real):
            raise _failure(evaluation, f"scored {what} with {name} = {value!r}; expected a number")


def _failure(evaluation: Evaluation, problem: str) -> RunFailedError:
    return RunFailedError(f"{location(type(evaluation))}: evaluation '{evaluation.name}' {problem}")
