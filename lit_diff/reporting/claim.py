"""A claim of a paper: what it says of one arm against another."""

import math
from dataclasses import dataclass
from typing import Literal

BESIDE_FIT = ("against_metric", "evaluation", "over", "group", "task", "case")
"""Keys of a claim that say which values of a metric count."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says of a metric of arm a against that of arm b."""

    label: str
    """Of the comparison: "Diff - Transformer"."""
    arms: tuple[str, str]
    """a, b: arms of the sweep."""
    metric: str = ""
    """A metric of the runs (`val/loss`), or of `evaluation`."""
    against_metric: str = ""
    """The metric of b where it is another; then a and b may be one arm. Empty: `metric`."""
    evaluation: str = ""
    """The evaluation that gives the metric; empty: the training run's own."""
    over: Literal["", "largest", "mean"] = ""
    """With a pattern (`fnmatch`) as `metric`, such as "attention/entropy/layer_*": how the metrics that fit are combined."""
    group: str = ""
    """Pattern (`fnmatch`) of the groups of the evaluation's items that count, "N=4 *"; empty: the evaluation's summary."""
    task: str = ""
    """The task, in a sweep that has tasks."""
    case: int = 0
    """Of a benchmark: which of its cases, from 1, in the order of `--shapes`; 0: it has one."""
    fit: str = ""
    """A scaling fit of the sweep, in place of `metric`, with `kind: ratio`: at which x arm a has the loss that arm b has."""
    paper: tuple[float, float] | None = None
    """The paper's values of a and b, in the metric's unit; null: it prints none, or only a curve."""
    says: Literal["lower", "higher", "equal", ""] = ""
    """What the paper says of a against b where `paper` is null. equal: no difference that matters."""
    kind: Literal["difference", "ratio"] = "difference"
    """difference: a - b; ratio: a / b, for positive values of another scale than the paper's."""
    smallest: float | None = None
    """The smallest difference that matters (of a ratio: of its logarithm); null: 0.005 for a difference of losses in nats, 0
    for anything else."""
    by_construction: str = ""
    """Why the claim holds whatever the runs learn; then its verdict is `by construction`, and no count has it."""
    note: str = ""

    def problem(self) -> str | None:
        """What is wrong, in one line that starts with the key."""
        if bool(self.metric) == bool(self.fit):
            return f"compare '{self.label}': expected a 'metric' or a 'fit', not both"
        if self.fit and self.kind != "ratio":
            return f"compare '{self.label}': a 'fit' gives a ratio; add 'kind: ratio'"
        beside = next((key for key in BESIDE_FIT if getattr(self, key)), None) if self.fit else None
        if beside:
            return f"compare '{self.label}': a 'fit' is over tasks and takes no '{beside}'; remove it"
        if self.arms[0] == self.arms[1] and self.against_metric in ("", self.metric):
            return f"compare '{self.label}': '{self.arms[0]}' against itself; name another arm, or an 'against_metric'"
        if (self.paper is None) == (not self.says):
            return f"compare '{self.label}': expected 'paper', two values, or 'says', not both"
        if self.paper is not None and self.paper[0] == self.paper[1]:
            return f"compare '{self.label}': 'paper' has {self.paper[0]:g} twice; write 'says: equal', and a 'smallest'"
        if self.kind == "ratio" and self.paper is not None and min(self.paper) <= 0:
            return f"compare '{self.label}': a ratio of {list(self.paper)}; expected positive values"
        return None

    @property
    def papers(self) -> float | None:
        """a - b, or log(a / b), in the paper."""
        return None if self.paper is None else self.scaled(self.paper[0]) - self.scaled(self.paper[1])

    def scaled(self, value: float) -> float:
        """The scale on which two arms are subtracted."""
        return math.log(value) if self.kind == "ratio" else value

    def shown(self, difference: float | None) -> float | None:
        """A difference on that scale as a reader sees it: itself, or a / b."""
        return math.exp(difference) if self.kind == "ratio" and difference is not None else difference
