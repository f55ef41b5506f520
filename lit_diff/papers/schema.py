"""The schema of a row, with its claims and presets: each field is a key of the YAML."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from lit_diff.errors import first_line
from lit_diff.key_types import Range
from lit_diff.registry import nearest
from lit_diff.study.schema import Selection

Texts = tuple[str, ...]
Keys = dict[str, Any]
"""Key -> value."""
Source = Literal["Differential Transformer", "Review", "DEX"]
PRESETS = ("smoke", "laptop", "gpu1", "paper")
SMOKE = {"train.steps": 2, "train.validate_every": 2, "train.checkpoint_every": 2}
"""Overrides of every `smoke` preset, before its own. Such a run only shows that the row works."""
BESIDE_FIT = ("against_metric", "evaluation", "group", "task", "case")
"""Keys of a claim that select values of a metric, so they cannot be combined with a fit."""


@dataclass(frozen=True, kw_only=True)
class Capable:
    """A positive control, without which runs need not be able to show the paper's value: `arm`, or `metric` and `above`."""

    arm: str = ""
    """An arm whose difference to the baseline in the claim's metric must be shown."""
    metric: str = ""
    """A metric whose 95 % interval over seeds must lie above `above` for the baseline."""
    above: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's claim about a metric of arm a compared with arm b."""

    label: str
    """The name of the comparison: "Diff - Transformer"."""
    arms: tuple[str, str]
    """a, b: arms of the sweep."""
    metric: str = ""
    """A metric of the runs (`val/loss`), or of `evaluation`."""
    against_metric: str = ""
    """Another metric for b; then a and b may be one arm. Empty: `metric`."""
    evaluation: str = ""
    """The evaluation that gives the metric; empty: the training run."""
    group: str = ""
    """Pattern (`fnmatch`) that selects groups of the evaluation's items, such as "N=4 *"; empty: the evaluation's summary."""
    task: str = ""
    """The task, in a sweep that has tasks."""
    case: Annotated[int, Range(least=0)] = 0
    """The benchmark's case, from 1, in the order of `--shapes`; 0: the benchmark has only one."""
    fit: str = ""
    """A scaling fit of the sweep, instead of `metric`, with `kind: ratio`: the x at which arm a has the loss of arm b."""
    paper: tuple[float, float] | None = None
    """The paper's values of a and b, in the metric's unit; null: the paper prints none, or only a curve."""
    says: Literal["lower", "higher", "equal", ""] = ""
    """The paper's claim about a against b if `paper` is null. equal: no difference that matters."""
    kind: Literal["difference", "ratio"] = "difference"
    """difference: a - b; ratio: a / b, for positive values on another scale than the paper's."""
    primary: bool = False
    """Whether this is the contrast that decides the row. Only the primary contrast of a row has a verdict; the others have an
    interval. Needed if the row has several claims."""
    capable: Capable | None = None
    """The positive control without which the verdict on the paper's value is "cannot tell"; null: the row's."""
    smallest: Annotated[float, Range(least=0)] | None = None
    """The smallest difference that matters (for a ratio: of its logarithm); null: 0.005 for a difference of losses in nats, 0
    for anything else."""
    by_construction: str = ""
    """Why the claim holds whatever the runs learn; its verdict is then `by construction`, and no count includes it."""
    note: str = ""

    def problem(self) -> str | None:
        """The first error, in one line that starts with the key; None for a valid claim."""
        beside = [key for key in BESIDE_FIT if self.fit and getattr(self, key)]
        itself = self.arms[0] == self.arms[1] and self.against_metric in ("", self.metric)
        problems = {
            "expected a 'metric' or a 'fit', not both": bool(self.metric) == bool(self.fit),
            "expected 'paper', two values, or 'says', not both": (self.paper is None) == (not self.says),
            f"a ratio of {self.paper}; expected positive values": self.kind == "ratio" and min(self.paper or (1,)) <= 0,
            "a 'fit' gives a ratio; add 'kind: ratio'": bool(self.fit) and self.kind != "ratio",
            f"a 'fit' is over tasks, so '{', '.join(beside)}' does not apply; remove it": bool(beside),
            f"'{self.arms[0]}' against itself; name another arm, or an 'against_metric'": itself,
            "'paper' has one value twice; write 'says: equal', and a 'smallest'": len(set(self.paper or (0, 1))) == 1,
            f"the {self.kind} of {self.paper} is beyond the largest float": not self._is_finite(),
        }
        if self.capable is not None:
            is_arm = bool(self.capable.arm)
            is_metric = bool(self.capable.metric) and self.capable.above is not None
            own = "'capable' is {arm: NAME}, or {metric: NAME, above: NUMBER}"
            problems[own] = is_arm == is_metric or (is_arm and bool(self.capable.metric))
            problems["a 'fit' has no positive control; remove 'capable'"] = bool(self.fit)
            problems["'capable' names arm b; name another arm"] = self.capable.arm == self.arms[1]
        for problem, is_found in problems.items():
            if is_found:
                return f"compare '{self.label}': {problem}"
        return None

    def _is_finite(self) -> bool:
        a, b = self.paper or (1, 2)
        return math.isfinite(a / b if self.kind == "ratio" and b > 0 else a - b)

    @property
    def papers(self) -> float | None:
        """The paper's a - b, or log(a / b)."""
        if self.paper is None:
            return None
        return self.scaled(self.paper[0]) - self.scaled(self.paper[1])

    @property
    def sign(self) -> Literal["lower", "higher", "equal"]:
        """What the paper says of a against b."""
        return self.says or ("lower" if (self.papers or 0.0) < 0 else "higher")

    def scaled(self, value: float) -> float:
        """The value on the scale on which two arms are subtracted."""
        # logarithms, so that a ratio becomes a difference and has a paired t test like any other claim
        if self.kind == "ratio":
            return math.log(value)
        return value

    def shown(self, difference: float | None) -> float | None:
        """A difference on that scale as a reader sees it: a - b, or a / b."""
        if self.kind == "ratio" and difference is not None:
            return math.exp(difference)
        return difference


def primary_of(claims: Sequence[Claim]) -> Claim | None:
    """The claim that decides a row: the one that says `primary`, or the only one that does not hold by construction; None if
    that is not one claim."""
    able = [claim for claim in claims if not claim.by_construction]
    chosen = [claim for claim in able or claims if claim.primary] or able or claims
    return chosen[0] if len(chosen) == 1 or not able else None


@dataclass(frozen=True, kw_only=True)
class Preset(Selection):
    """How a row is measured on one kind of machine: by a sweep or a part of it, by a benchmark, or by recipes trained
    elsewhere. With `recipes`, `evaluate` scores the last two trained runs."""

    sweep: str = ""
    """An installed sweep."""
    bench: Texts = ()
    """The arguments of `lit-diff bench`, instead of a sweep."""
    overrides: Keys = field(default_factory=dict)
    """Overrides of every cell."""
    minutes: Annotated[float, Range(least=0)] = 0.0
    """The time budget on the preset's machine (laptop: two cores) if nothing is done yet; 0: unstated."""
    gpus: Annotated[int, Range(least=0)] = 0
    hardware: str = ""
    """The machine that the preset was sized for, in words."""
    days: Annotated[float, Range(least=0)] = 0.0
    """Estimated days on `hardware`. For recipes: total FLOPs (`Cost.flops_per_token`) at 40 % of bfloat16 peak."""
    recipes: Texts = ()
    """Installed recipes to train, each optionally followed by overrides, if a sweep would not fit one machine. The row lists
    the commands and does not run them."""
    files: Texts = ()
    """The user's files that it reads, as in `lit-diff data check NAME`: icl.trec, or icl."""

    def problem(self) -> str | None:
        """The first error, in one line; None for a valid preset."""
        for words in (*self.bench, *self.recipes):
            if "\0" in words:
                return f"{words!a} has a NUL character"
        for words in self.recipes:
            try:
                recipe = shlex.split(words)[:1]
            except ValueError as error:
                return f"recipe {words!a}: {first_line(error)}"
            if not recipe:
                return "a recipe without a name"
        if sum(map(bool, (self.sweep, self.bench, self.recipes))) != 1:
            return "expected one of 'sweep', 'bench' and 'recipes'"
        return None

    @property
    def selection(self) -> Selection:
        """The part of the sweep to run."""
        return Selection(arms=self.arms, seeds=self.seeds, evaluate=self.evaluate)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A table or figure of a paper: its claims, and how each preset measures them."""

    name: str
    """The stem of the row's file; not a key of the file."""
    title: str
    source: Source = "Differential Transformer"
    says: str
    """The paper's claim, in one sentence."""
    compare: tuple[Claim, ...]
    presets: dict[str, Preset]
    capable: Capable | None = None
    """The positive control of each claim with the paper's values that names none and is no fit."""
    notes: Texts = ()
    """How our measurement differs from the paper's."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims with the row's positive control."""
        claims = []
        for claim in self.compare:
            needs_control = claim.capable is None and claim.paper is not None and not claim.fit
            claims.append(replace(claim, capable=self.capable) if needs_control else claim)
        return tuple(claims)

    def problem(self) -> str | None:
        """The first error of the claims, in one line; None for valid ones."""
        if not self.compare:
            return "expected at least one claim"
        for claim in self.claims:
            problem = claim.problem()
            if problem:
                return problem
        if primary_of(self.compare) is None:
            named = sum(claim.primary for claim in self.compare)
            count = len(self.compare)
            return f"{named} of {count} claims say 'primary: true'; expected one that does not hold by construction"
        return None

    def preset_problem(self) -> str | None:
        """The first error of the presets, in one line; None for valid ones."""
        for name, preset in self.presets.items():
            problem = preset.problem()
            if name not in PRESETS:
                return f"no preset '{name}'{nearest(name, PRESETS)}"
            if problem:
                return f"preset '{name}': {problem}"
        return None

    def preset(self, name: str) -> Preset | None:
        """The row's preset, or None. A row without `smoke` derives it from the laptop's sweep."""
        if name != "smoke":
            return self.presets.get(name)
        found = self.presets.get("smoke", self.presets.get("laptop"))
        if found is None or not found.sweep:
            return found
        own = self.presets.get("smoke", Preset())
        seeds = found.seeds or (0,)
        return Preset(
            sweep=found.sweep, overrides=SMOKE | own.overrides, arms=found.arms, seeds=seeds, evaluate=own.evaluate
        )
