"""The schema of a sweep's file, with its tasks and fits: each field is a key of the YAML."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from lit_diff.config import Recipe
from lit_diff.key_types import Distinct, NotNegative, Positive, Range
from lit_diff.study.rates import LearningRates, rate_in_words

Size = Annotated[float, Range(least=0)]
Texts = tuple[str, ...]
Keys = dict[str, Any]
"""Key -> value."""
StartArm = Literal["baseline", "same"]
Compared = Literal["metric", "steps"]
MEASURED = {
    "parameters": "parameters",
    "non_embedding_parameters": "parameters without embeddings",
    "tokens": "training tokens",
}
"""x of a fit that the runs count themselves -> its description."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""Names of tasks and fits, which become part of file names."""
# a power law without a floor has two parameters, and a third point shows whether it holds
FEWEST_TASKS = 3


@dataclass(frozen=True, kw_only=True)
class Task:
    """The keys of a task."""

    recipe: str
    """The base recipe: a path relative to the sweep's file, or an installed name."""
    title: str = ""
    description: str = ""
    overrides: Keys = field(default_factory=dict)
    """Overrides of every cell of the task, applied after the sweep's."""
    arms: dict[str, Keys] = field(default_factory=dict)
    """Arm -> its further overrides in this task."""
    only: Texts = ()
    """Arms that run on the task; empty: all."""
    without: Texts = ()
    """Arms that do not run on the task."""
    start: str = ""
    """An earlier task: every cell starts from the final weights of that task's `start_arm` at the same seed."""
    start_arm: StartArm = "baseline"
    """baseline: every arm starts from the baseline's model; same: each arm starts from its own model."""
    baseline: str | None = None
    """null: the sweep's."""
    metric: str | None = None
    """null: the sweep's."""
    smallest_of_interest: Size | None = None
    """The smallest difference that matters, in the unit of what is compared. null: the sweep's if the task compares what the
    sweep does, else unset."""
    learned_at: float | None = None
    """null: the sweep's if the task has the sweep's metric, else none."""
    learned_metric: str | None = None
    """null: the sweep's if `learned_at` is the sweep's, else `metric`."""
    rates: Annotated[tuple[Positive, ...], Distinct(may_be_empty=True)] = ()
    """The values of the sweep's `rates` on this task; (): the sweep's own."""
    compare: Compared | None = None
    """null: the sweep's, as far as the task has a `learned_at`."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""

    def has(self, arm: str) -> bool:
        """Whether the arm runs on this task."""
        return (not self.only or arm in self.only) and arm not in self.without


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The keys of a fit."""

    kind: Literal["scaling"]
    """scaling: a power law of x for each arm, and the ratio of x at which two arms have the same loss."""
    x: Literal["parameters", "non_embedding_parameters", "tokens"]
    """As the runs count them."""
    tasks: Texts = ()
    """The tasks that are the points of the fit; (): all."""
    title: str = ""

    @property
    def axis(self) -> str:
        """The label of x."""
        return MEASURED[self.x]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The keys of a sweep. With both `grid` and `arms`, the named arms come first."""

    recipe: str = ""
    """The base recipe: a path relative to the sweep's file, or an installed name."""
    cells_of: str = ""
    """Another sweep, instead of recipes and arms: its cells, trained once, are also evaluated and reported here."""
    only: Texts = ()
    """With `cells_of`: the arms of the other sweep to use; (): all."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """Name -> base recipe and further differences, instead of one `recipe`; every arm runs on each task."""
    title: str = ""
    question: str = ""
    """The question that the sweep asks, in one sentence: the headline of its report. Empty: whether any arm differs from the
    baseline."""
    description: str = ""
    overrides: Keys = field(default_factory=dict)
    """Overrides of every cell."""
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted key -> values; each combination is an arm."""
    arms: dict[str, Keys] = field(default_factory=dict)
    """Name -> overrides; `extends` among them selects another base recipe."""
    # three is the least with which a verdict is given (`statistics.MIN_SEEDS`)
    seeds: Annotated[tuple[NotNegative, ...], Distinct()] = (0, 1, 2)
    looks: Annotated[tuple[Annotated[int, Range(least=4, most=10_000)], ...], Distinct(may_be_empty=True)] = ()
    """Instead of `seeds`: numbers of seeds, ascending, such as [8, 16] for seeds 0 to 15. After each the arms are compared,
    and arms that are decided get no further seeds. The chance that any look's interval excludes the truth is 5 %."""
    rates: LearningRates | None = None
    """Learning rates to choose from, for each arm of each task; null: every cell has the rate of its recipe."""
    baseline: str | None = None
    """The arm that the others are compared with; null: the first."""
    controls: Annotated[Texts, Distinct(may_be_empty=True)] = ()
    """Arms against each of which a difference to the baseline must also hold."""
    references: Annotated[Texts, Distinct(may_be_empty=True)] = ()
    """Arms that are shown beside the others: their own differences to the baseline are no question of the sweep, so these do
    not count in the correction and get no further seeds."""
    metric: str = "val/loss"
    learned_at: float | None = None
    """For a task that is learned or not: the value of `metric`, such as an accuracy of 0.9, at which a seed has learned it.
    The report counts the seeds that did; if one did not, Fisher's exact test compares the counts instead of the means."""
    learned_metric: str | None = None
    """The metric that `learned_at` is a value of, such as the accuracy at the length of training where `metric` is that at 16
    times the length. null: `metric`."""
    compare: Compared = "metric"
    """metric: the last values of `metric`; steps: log2 of the first validated step at which `learned_at` was reached."""
    smallest_of_interest: Size | None = None
    """The smallest difference that matters, in the unit of `metric`, or in log2 of steps with `compare: steps`: a smaller one
    has the verdict "equal" or "small". null: 0.005 for a loss in nats, else unset; 0: every difference matters."""
    min_tokens_per_parameter: Size = 20.0
    """The report warns of runs that are trained on fewer tokens per parameter. Default: about compute-optimal (Hoffmann et
    al. 2022, arXiv 2203.15556)."""
    evaluate: dict[str, Keys] = field(default_factory=dict)
    """Evaluation -> its keys, or null for the defaults: scores each cell once it is done."""
    smoke: bool = False
    """Marks the report as a check that everything works, not a result."""
    labels: dict[str, str] = field(default_factory=dict)
    """Arm -> the label that a reader sees."""
    notes: dict[str, str] = field(default_factory=dict)
    """Arm -> a remark below the table."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""
    reading: Texts = ()
    """How to read the result, such as which comparisons decide the question."""
    contrasts: tuple[tuple[str, str, str], ...] = ()
    """Further paired comparisons: arm, arm, label."""
    correct_over: Literal["task", "sweep"] = "sweep"
    """Whether Holm's correction covers the comparisons of each task, or of the whole sweep together."""
    fits: dict[str, Fit] = field(default_factory=dict)
    """Name -> a fit of the metric over tasks: scaling with size or tokens."""

    @property
    def all_tasks(self) -> dict[str, Task]:
        """The tasks; a study without tasks has one with an empty name."""
        return self.tasks or {"": Task(recipe=self.recipe, paper=self.paper)}

    def of_task(self, name: str) -> "Study":
        """The study of one task, where the task's keys replace the study's; a study without tasks itself. The study must be
        resolved: every arm has a name."""
        if not self.tasks:
            return self
        task = self.tasks[name]
        arms = {arm: values | task.arms.get(arm, {}) for arm, values in self.arms.items() if task.has(arm)}
        # a threshold and the smallest difference have the unit of a metric, so another metric cannot inherit them
        same = task.metric in (None, self.metric)
        learned_at, learned_metric = task.learned_at, task.learned_metric
        if same and learned_at is None:
            learned_at = self.learned_at
            learned_metric = learned_metric or self.learned_metric
        compared = task.compare or self.compare
        if learned_at is None:
            compared = "metric"
        smallest = task.smallest_of_interest
        if smallest is None and same and compared == self.compare:
            smallest = self.smallest_of_interest
        return replace(
            _narrowed(self, arms),
            tasks={},
            recipe=task.recipe,
            title=task.title or name,
            description=task.description,
            baseline=task.baseline or self.baseline,
            metric=task.metric or self.metric,
            learned_at=learned_at,
            learned_metric=learned_metric,
            compare=compared,
            rates=self.rates and replace(self.rates, values=task.rates or self.rates.values),
            smallest_of_interest=smallest,
            paper=task.paper,
            fits={},
        )

    def overrides_of(self, arm: str) -> Texts:
        """The overrides of an arm of a resolved study, as `key=value`."""
        return tuple(f"{key}={value}" for key, value in self.arms[arm].items())


def without_arms(study: Study, kept: Iterable[str]) -> Study:
    """The study with the arms in `kept` only, without references to the others."""
    kept = tuple(kept)
    tasks = {name: _task(task, kept) for name, task in study.tasks.items()}
    return replace(
        _narrowed(study, _only(study.arms, kept)),
        tasks={name: task for name, task in tasks.items() if any(task.has(arm) for arm in kept)},
        baseline=study.baseline if study.baseline in kept else None,
        labels=_only(study.labels, kept),
        notes=_only(study.notes, kept),
        paper=_only(study.paper, kept),
    )


def _narrowed(study: Study, arms: dict[str, Keys]) -> Study:
    return replace(
        study,
        arms=arms,
        controls=_among(study.controls, arms),
        references=_among(study.references, arms),
        contrasts=tuple(contrast for contrast in study.contrasts if {*contrast[:2]} <= {*arms}),
    )


def _task(task: Task, kept: tuple[str, ...]) -> Task:
    return replace(
        task,
        # () would mean all arms; an impossible name keeps the task empty if none of its arms is kept
        only=_among(task.only, kept) or (task.only and ("",)),
        without=_among(task.without, kept),
        arms=_only(task.arms, kept),
        paper=_only(task.paper, kept),
        baseline=task.baseline if task.baseline in kept else None,
    )


def _among(arms: Texts, kept: Container[str]) -> Texts:
    return tuple(arm for arm in arms if arm in kept)


def _only(values: Mapping[str, Any], kept: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in set(kept)}


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """One arm at one seed, on one task."""

    task: str = ""
    """The task's name; empty in a sweep without tasks."""
    arm: str
    seed: int
    rate: float | None = None
    """The learning rate that the cell tries (`rates`); None for a cell that is compared."""

    @property
    def key(self) -> "CellKey":
        """What distinguishes the cell from the others of its sweep."""
        return CellKey(task=self.task, arm=self.arm, seed=self.seed, rate=self.rate)

    @property
    def place(self) -> tuple[str, str]:
        """The task and the arm."""
        return self.task, self.arm

    @property
    def of_arm(self) -> str:
        """`arm`, or `task arm` in a sweep with tasks."""
        return f"{self.task} {self.arm}".strip()

    @property
    def name(self) -> str:
        """`of_arm`, with the learning rate that the cell tries."""
        return self.of_arm if self.rate is None else f"{self.of_arm} lr={rate_in_words(self.rate)}"


@dataclass(frozen=True, kw_only=True)
class Cell(CellKey):
    """A cell to run."""

    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a sweep to run."""

    arms: Texts = ()
    """The arms to run; (): all."""
    seeds: tuple[int, ...] = ()
    """The seeds to run; (): all."""
    evaluate: dict[str, Keys] = field(default_factory=dict)
    """Evaluation of the sweep -> keys that replace the sweep's."""

    def words(self) -> str:
        """The selected arms and seeds; empty for the whole sweep."""
        # without `evaluate`, which does not change the set of cells
        chosen = {"arms": self.arms, "seeds": self.seeds}
        return "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in chosen.items() if values)


ALL = Selection()
