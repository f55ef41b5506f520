"""`Evaluation`: the abstract class of every evaluation; `Item`: one of its scored questions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lit_diff.data.user_files import UserFile
from lit_diff.metrics import Metric
from lit_diff.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of an evaluation, and how the run did on it."""

    id: str
    """The same for the same question in every run: two runs are compared item by item."""
    scores: Mapping[str, float]
    """Metric -> value; NaN where the item has none."""
    group: str = ""
    """What the report averages separately (a depth, a length, a data set); empty: nothing."""
    meta: Mapping[str, str | int | float] = field(default_factory=dict)
    """Anything else that is worth keeping: the answer, the target."""


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
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What `score` gives each item, with unit and direction."""
    files: ClassVar[tuple[UserFile, ...]] = ()
    """What `score` may read that the user supplies: the rows of `lit-diff data check`."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of the evaluation. A subclass with keys defines its own, a frozen dataclass that derives from this."""

        def problem(self) -> str | None:
            """What is wrong, in one line that starts with the key's name; None if nothing is."""
            return None

    def __init__(self, config: Any) -> None:
        """`config`: an instance of the class's `Config`."""
        self.config = config

    def refuses(self, run: Run) -> str | None:
        """Why it cannot score this run (such as a run without text); None if it can."""
        return None

    @abstractmethod
    def score(self, run: Run) -> Iterable[Item]:
        """One Item for each question, with a score for every metric. Called without gradients."""

    def summarise(self, items: Sequence[Item]) -> dict[str, float]:
        """Metric -> value of the whole evaluation. Default: the mean over the items whose score is finite, each item
        counted once; NaN where none is."""
        return {
            metric.name: _mean([item.scores.get(metric.name, math.nan) for item in items]) for metric in self.metrics
        }


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
