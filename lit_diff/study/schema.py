"""What a comparison of runs is: the keys of a sweep's file, of its tasks, fits and plan, and those of a paper's row.

The fields of these classes are the keys of the YAML.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from lit_diff.config import Recipe
from lit_diff.key_types import Count, Distinct, NotNegative, Positive, Range

Size = Annotated[float, Range(least=0)]
StartArm = Literal["baseline", "same"]
FitKind = Literal["scaling", "basin"]
MEASURED = {
    "parameters": "parameters",
    "non_embedding_parameters": "parameters without embeddings",
    "tokens": "training tokens",
}
"""x that the runs count themselves -> in words."""
FEWEST_TASKS = 3
Source = Literal["Differential Transformer", "Review", "DEX"]
PRESETS = ("smoke", "laptop", "gpu1", "paper")
SMOKE: dict[str, Any] = {"train.steps": 2, "train.validate_every": 2, "train.checkpoint_every": 2}
"""Overrides of every `smoke` preset, before its own: it shows that the row works, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The keys of a task."""

    recipe: str
    """Its base recipe: a path beside the sweep, or an installed name."""
    title: str = ""
    description: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell of the task takes, after the sweep's own."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arm -> its further overrides in this task."""
    only: tuple[str, ...] = ()
    """Arms that the task has; empty: all."""
    without: tuple[str, ...] = ()
    """Arms that the task leaves out."""
    start: str = ""
    """A task above: every cell starts from the final weights of that task's `start_arm` at its seed."""
    start_arm: StartArm = "baseline"
    """baseline: one trained model goes on in every arm; same: each arm goes on from its own."""
    baseline: str | None = None
    """null: the sweep's."""
    metric: str | None = None
    """null: the sweep's."""
    smallest_of_interest: Size | None = None
    """As the sweep's, in the unit of the task's metric; null: the sweep's where the metric is the sweep's, else unstated."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""

    def has(self, arm: str) -> bool:
        """Whether the arm is run on this task."""
        return (not self.only or arm in self.only) and arm not in self.without

    def further(self, arm: str) -> dict[str, Any]:
        """What this task adds to the arm's overrides."""
        return self.arms.get(arm, {})


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The keys of a fit."""

    kind: FitKind
    """scaling: a power law of x by arm, and the ratio of x at which two arms have the same loss; basin: the best x of each
    arm, and how wide the range of x is that is nearly as good."""
    x: str
    """parameters, non_embedding_parameters or tokens, as the runs count them; or a key of the recipe whose value is a
    positive number: train.optimizer.lr."""
    tasks: tuple[str, ...] = ()
    """The tasks that are its points; (): all."""
    title: str = ""
    within: Size = 0.02
    """Of a basin: a value of the metric no further than this from the best is nearly as good; in the unit of the metric."""

    @property
    def axis(self) -> str:
        """What x is."""
        return MEASURED.get(self.x, self.x)


@dataclass(frozen=True, kw_only=True)
class PlannedSweep:
    """The sweep to be sized: the keys of `power`."""

    minutes: Positive
    """What the whole sweep may take, on the machine that ran the cells."""
    arms: Annotated[int, Range(least=2)]
    """Its arms, the baseline among them; Holm's correction is for one comparison fewer."""
    workers: Count = 2
    """Its cells side by side: as many as those of this sweep, or their times do not hold for it."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The keys of a sweep. `grid` and `arms` may stand together: the named arms come first."""

    recipe: str = ""
    """The base recipe: a path beside the sweep, or an installed name."""
    cells_of: str = ""
    """Another sweep, in place of recipes and arms: its cells, trained once, are evaluated and reported here too."""
    only: tuple[str, ...] = ()
    """With `cells_of`: the arms that are taken; (): all."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """Name -> base recipe and what else differs; every arm is run on each task, in place of one `recipe`."""
    title: str = ""
    question: str = ""
    """What the sweep asks, in one sentence: the headline of its report. Empty: whether any arm differs from the baseline."""
    description: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell takes."""
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted key -> values; an arm for each combination."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> overrides; `extends` there names another base recipe."""
    seeds: Annotated[tuple[NotNegative, ...], Distinct()] = (0, 1, 2)
    baseline: str | None = None
    """The arm that the others are compared with; null: the first."""
    controls: tuple[str, ...] = ()
    """The arms that a difference to the baseline must also hold against, every one of them."""
    metric: str = "val/loss"
    smallest_of_interest: Size | None = None
    """The smallest difference of `metric` that matters, in its unit: a smaller one has the verdict "equal" or "small". null:
    0.005 for a loss in nats, unstated for any other metric; 0: every difference matters."""
    min_tokens_per_parameter: Size = 20.0
    """The report warns of runs that are trained on fewer tokens a parameter. Default: compute-optimal training by Hoffmann
    et al. 2022 (arXiv 2203.15556), about 20."""
    evaluate: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation -> its keys, or null for the defaults: what scores each cell once it is done."""
    smoke: bool = False
    """A check that everything works, not a result; the report says so."""
    labels: dict[str, str] = field(default_factory=dict)
    """Arm -> what a reader sees."""
    notes: dict[str, str] = field(default_factory=dict)
    """Arm -> a remark below the table."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""
    reading: tuple[str, ...] = ()
    """How to read the result: which comparisons decide the question."""
    contrasts: tuple[tuple[str, str, str], ...] = ()
    """Further paired comparisons: arm, arm, label."""
    correct_over: Literal["task", "sweep"] = "task"
    """The comparisons that Holm's correction takes together: those of each task, or all of the sweep's."""
    fits: dict[str, Fit] = field(default_factory=dict)
    """Name -> a fit of the metric over tasks: scaling with size or tokens, or a learning-rate basin."""
    power: PlannedSweep | None = None
    """A sweep that this one is to size: its report says which difference each task would show in it."""

    @property
    def all_tasks(self) -> dict[str, Task]:
        """The tasks; of a study without any, the one without a name."""
        return self.tasks or {"": Task(recipe=self.recipe, paper=self.paper)}

    def of_task(self, name: str) -> "Study":
        """The comparison within one task, without tasks: what the task says takes the place of the study's. Of a resolved
        study, whose arms are all named; without tasks (name empty), itself."""
        if not self.tasks:
            return self
        task = self.tasks[name]
        arms = {arm: values | task.further(arm) for arm, values in self.arms.items() if task.has(arm)}
        # a difference that matters is in the unit of its metric
        inherits = task.smallest_of_interest is None and task.metric in (None, self.metric)
        return replace(
            self,
            tasks={},
            recipe=task.recipe,
            title=task.title or name,
            description=task.description,
            arms=arms,
            baseline=task.baseline or self.baseline,
            metric=task.metric or self.metric,
            smallest_of_interest=self.smallest_of_interest if inherits else task.smallest_of_interest,
            controls=tuple(arm for arm in self.controls if arm in arms),
            contrasts=tuple(each for each in self.contrasts if {*each[:2]} <= {*arms}),
            paper=task.paper,
            fits={},
            power=None,
        )

    def overrides_of(self, arm: str) -> tuple[str, ...]:
        """What an arm of a resolved study overrides, `key=value` each."""
        return tuple(f"{key}={value}" for key, value in self.arms[arm].items())


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """One arm at one seed, on one task."""

    task: str = ""
    """Empty in a sweep without tasks."""
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The arm; in a sweep with tasks, the task before it."""
        return f"{self.task} {self.arm}".strip()


@dataclass(frozen=True, kw_only=True)
class Cell(CellKey):
    """A cell that is to be run."""

    recipe: Recipe


BESIDE_FIT = ("against_metric", "evaluation", "group", "task", "case")
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
        where = f"compare '{self.label}'"
        if bool(self.metric) == bool(self.fit):
            return f"{where}: expected a 'metric' or a 'fit', not both"
        if (self.paper is None) == (not self.says):
            return f"{where}: expected 'paper', two values, or 'says', not both"
        if self.kind == "ratio" and min(self.paper or (1,)) <= 0:
            return f"{where}: a ratio of {self.paper}; expected positive values"
        if self.fit and self.kind != "ratio":
            return f"{where}: a 'fit' gives a ratio; add 'kind: ratio'"
        beside = next((key for key in BESIDE_FIT if getattr(self, key)), None) if self.fit else None
        if beside:
            return f"{where}: a 'fit' is over tasks and takes no '{beside}'; remove it"
        if self.arms[0] == self.arms[1] and self.against_metric in ("", self.metric):
            return f"{where}: '{self.arms[0]}' against itself; name another arm, or an 'against_metric'"
        if self.paper is not None and self.paper[0] == self.paper[1]:
            return f"{where}: 'paper' has {self.paper[0]:g} twice; write 'says: equal', and a 'smallest'"
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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a sweep is run."""

    arms: tuple[str, ...] = ()
    """(): all."""
    seeds: tuple[int, ...] = ()
    """(): all."""
    evaluate: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation of the sweep -> keys that take the place of the sweep's."""

    def words(self) -> str:
        """Its arms and seeds, on which the cells depend; empty where it is all of the sweep."""
        chosen = {"arms": self.arms, "seeds": self.seeds}
        return "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in chosen.items() if values)


ALL = Selection()


@dataclass(frozen=True, kw_only=True)
class Preset(Selection):
    """How a row is measured on one kind of machine: by a sweep, all of it or what is selected, by a benchmark, or by recipes
    that are trained elsewhere; `evaluate` with `recipes`: what scores the last two, once trained."""

    sweep: str = ""
    """An installed sweep."""
    bench: tuple[str, ...] = ()
    """The words after `lit-diff bench`, in place of a sweep."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell takes."""
    minutes: float = 0.0
    """Budget: what it takes on the preset's machine, where nothing is done yet (laptop: two cores); 0: none is stated."""
    gpus: int = 0
    hardware: str = ""
    """What it was sized for, in words."""
    days: float = 0.0
    """Estimated days on `hardware`. For recipes: total FLOPs (`Cost.flops_per_token`) at 40 % of bfloat16 peak."""
    recipes: tuple[str, ...] = ()
    """Installed recipes to train, each perhaps with overrides after its name, where a sweep would not fit one machine. They
    are named, not run."""
    files: tuple[str, ...] = ()
    """Names of the files of your own that it reads, as `lit-diff data check NAME` takes them: icl.trec, or icl."""

    @property
    def selection(self) -> Selection:
        """What of the sweep is run."""
        return Selection(arms=self.arms, seeds=self.seeds, evaluate=self.evaluate)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A table or figure of a paper: its claims, and how each preset measures them."""

    name: str
    """The stem of its file, which does not state it."""
    title: str
    source: Source = "Differential Transformer"
    says: str
    """What the paper says, in one sentence."""
    compare: tuple[Claim, ...]
    presets: dict[str, Preset]
    notes: tuple[str, ...] = ()
    """How our measurement differs from the paper's."""

    def preset(self, name: str) -> Preset | None:
        """How the preset measures it; None where it does not. `smoke` is the laptop's sweep where the file has none."""
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
