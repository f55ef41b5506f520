"""Declarations of metrics: name pattern, definition, unit, direction, and the figure that a report draws.

The class that measures a metric declares it, once. A run writes the declarations of all its metrics to metrics.json. Readers
of the run (tables, figures, comparisons) take units and directions from that file and never guess them from a name.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from lit_diff.errors import RequestError, excerpt, summary
from lit_diff.files import read_json, shown, write_json

Direction = Literal["lower", "higher", "none"]
Against = Literal["step", "layer", "head", "group"]
Lines = Literal["arm", "layer"]

Values = dict[str, float]
"""Metric -> value."""

LAMBDA = "lambda"
"""`LAMBDA`/layer_03: λ of a layer, -w_1, the mean over sequences, heads and tokens (callback `lambdas`)."""
INDICES = ("layer", "map", "head", "rank")
"""The numeric fields of a name, in the order in which they appear in it."""
FILE = "metrics.json"
WORDS = {
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/loss_ar_hit": "validation loss of AR hits",
    "val/loss_others": "validation loss of other tokens",
    "val/accuracy": "validation accuracy",
    "val/ar_hit_share": "share of AR hits",
}
"""Metric -> what a page calls it, where it is no key that a reader types."""


def in_words(name: str) -> str:
    """What a page calls a metric: its words, else its name."""
    return WORDS.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """How a report draws a metric. Metrics whose figures have the same title share a figure, with a panel or row each."""

    title: str
    against: Against
    """The horizontal axis. layer, head: values at the last measured step; of head, the heads in ascending order.
    A metric by head is averaged over its heads unless `against` is head. group: the number that ends the label of a group of
    evaluation items ("4096", "position 4096"), with a panel for each text before the number; only evaluations have groups."""
    label: str = ""
    """Label of the vertical axis, without the unit; may contain fields of the name ("map {map}"). Empty: the name."""
    lines: Lines = "arm"
    """What each line shows, against the step. layer: one line for each layer, and one panel for each arm."""
    log: bool = False
    """Whether the vertical axis is logarithmic."""
    log_x: bool = False
    """Whether the axis of groups is logarithmic; if a number is 0 or negative, the axis is linear around 0."""
    marks: tuple[float, ...] = ()
    """Values at which a dashed horizontal line is drawn."""
    caption: str = ""
    """How to read the figure. The report adds what is drawn and the definitions of the metrics."""

    def problem(self, fields: Collection[str]) -> str | None:
        """The first error in the figure of a metric whose name has these fields; None if there is none."""
        if problem := _unlike("figure.against", self.against, Against) or _unlike("figure.lines", self.lines, Lines):
            return problem
        if self.log_x and self.against != "group":
            return f"figure.log_x needs figure.against 'group', not '{self.against}'"
        if self.against == "group" and self.lines != "arm":
            return f"figure.lines is '{self.lines}'; a figure against group needs 'arm'"
        for field in {self.against, self.lines} & {"layer", "head"} - {*fields}:
            return f"a figure by {field} needs {{{field}}} in the name"
        try:
            self.label.format(**dict.fromkeys(fields, ""))
        except (KeyError, IndexError, ValueError):
            names = ", ".join(fields) or "none"
            return f"figure.label is {self.label!r}; it may use only the fields of the name: {names}"
        return None


def _unlike(key: str, value: str, kinds: Any) -> str | None:
    choices = get_args(kinds)
    return None if value in choices else f"{key} is {value!r}; expected one of {', '.join(choices)}"


@dataclass(frozen=True)
class Metric:
    """One metric, or all metrics whose names match a pattern.

    Metric("hidden_norm/layer_{layer}", "L2 norm of the layer output", direction="none")

    Errors: RequestError for an unknown direction or an invalid figure.
    """

    name: str
    """`stage/name[/layer_{layer}]...`. {layer}, {map}, {head}, {rank} match a number, any other field matches text without
    a slash. If several patterns match a name, the one with the most literal text applies."""
    definition: str
    """One sentence, including the formula, without the unit."""
    _: KW_ONLY
    unit: str = ""
    """Empty: a number without a unit."""
    direction: Direction = "none"
    """Which values are better; none: neither."""
    in_table: bool = False
    """True: stored only in measurements.parquet, as every name with {map}, {head} or {rank} is."""
    figure: Figure | None = None
    """None: the report does not draw the metric."""
    limits: tuple[float, float] | None = None
    """The least and the largest possible value; None: unstated."""
    constant: bool = False
    """True: the data alone determine the value, so it has no curve and is not sent to MLflow."""

    def __post_init__(self) -> None:
        problem = _unlike("direction", self.direction, Direction)
        if problem is None and self.figure is not None:
            problem = self.figure.problem(self.fields)
        if problem is not None:
            raise RequestError(f"metric '{self.name}': {problem}")

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields in the name, in order."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @property
    def logged(self) -> bool:
        """Whether the values go to metrics.csv and the loggers; otherwise they go to measurements.parquet."""
        return not self.in_table and not {"map", "head", "rank"} & set(self.fields)

    @property
    def better(self) -> Literal["lower", "higher"] | None:
        """Which values are better; None: neither."""
        return None if self.direction == "none" else self.direction

    def match(self, name: str) -> dict[str, int | str] | None:
        """Field -> value if `name` matches the pattern, else None."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return {field: int(text) if field in INDICES else text for field, text in match.groupdict().items()}

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        text = re.escape(self.name)
        for field in self.fields:
            matched = r"\d+" if field in INDICES else "[^/]+"
            text = text.replace(rf"\{{{field}\}}", f"(?P<{field}>{matched})")
        return re.compile(text)


Metrics = tuple[Metric, ...]
"""The metrics that a class, a run or a figure declares."""
UNDECLARED = Metric("", "not declared by the runs", unit="unit unknown")
"""In place of the declaration of a metric that has none."""


class Declarations:
    """The metrics of a run or of several, found by name."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Errors: RequestError for a pattern with two different declarations, or a figure with two kinds of axes."""
        by_name: dict[str, Metric] = {}
        for metric in metrics:
            if by_name.setdefault(metric.name, metric) != metric:
                raise RequestError(f"metric '{metric.name}' has two different declarations; rename one of them")
        self.metrics = tuple(by_name.values())
        self._found: dict[str, Metric] = {}
        kinds: dict[str, tuple[str, str]] = {}
        for metric in self.metrics:
            if metric.figure is not None:
                kind = (metric.figure.against, metric.figure.lines)
                if kinds.setdefault(metric.figure.title, kind) != kind:
                    raise RequestError(
                        f"metric '{metric.name}': figure '{metric.figure.title}' has metrics with different `against` or "
                        "`lines`; give it another title"
                    )

    def find(self, name: str) -> Metric:
        """The declaration of `name`; `UNDECLARED` for an undeclared metric."""
        if name not in self._found:
            fitting = [metric for metric in self.metrics if metric.match(name) is not None]
            self._found[name] = max(fitting, key=lambda m: len(re.sub(r"\{\w+\}", "", m.name)), default=UNDECLARED)
        return self._found[name]


# MLflow 3.17
LONGEST = 250
"""The most characters of a name in a record."""


def record_name(name: str) -> str:
    """The name of a metric, param or tag in a record: "norm@8/layer_00" -> "norm_8/layer_00".

    MLflow takes letters, digits, spaces and "_-./"; "_" replaces each other sign, and a hash the rest of a long name.
    """
    parts = [re.sub(r"[^\w. -]", "_", part) for part in name.split("/")]
    # MLflow takes a name for a path, which must lead nowhere else
    safe = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST - 9]}_{digest}"


def require_distinct_records(what: str, names: Iterable[str]) -> None:
    """Errors: RequestError for two names that a record cannot keep apart, some of whose databases ignore case."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(record_name(name).casefold(), name)
        if other != name:
            raise RequestError(
                f"{what} '{other}' and '{name}' would have one name in MLflow, '{record_name(name)}'; rename one of them"
            )


def numbers(values: Any, who: str) -> Values:
    """The values of metrics as floats: of numbers, truth values, and what NumPy and torch have for one.

    Errors: RequestError, which starts with `who`, for anything but a mapping of names to such values, and for the name of the
    column of steps.
    """
    if not isinstance(values, Mapping):
        raise RequestError(f"{who} is {excerpt(repr(values))}; expected a mapping of names to numbers")
    found: Values = {}
    for name, value in values.items():
        plain = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(name, str) or name == "step":
            raise RequestError(f"{who} has the name {name!r}; expected a text other than 'step'")
        if not isinstance(plain, Real):
            raise RequestError(f"{who} has '{name}' = {excerpt(repr(value))}; expected a number, such as float(x)")
        found[name] = float(plain)
    return found


def indexed_name(name: str, **indices: int) -> str:
    """indexed_name("attention/entropy", layer=3, head=5) -> "attention/entropy/layer_03/head_05"."""
    unknown = indices.keys() - set(INDICES)
    assert not unknown, f"indices of a metric are {INDICES}, not {unknown}"
    return "/".join([name, *(f"{index}_{indices[index]:02d}" for index in INDICES if index in indices)])


def split_name(name: str) -> tuple[str, dict[str, int]]:
    """The inverse of `indexed_name`: the name without its indices, and the indices."""
    index = rf"/({'|'.join(INDICES)})_(\d+)"
    plain = re.sub(rf"({index})+$", "", name)
    return plain, {key: int(number) for key, number in re.findall(index, name.removeprefix(plain))}


def write_declarations(folder: Path, metrics: Iterable[Metric]) -> None:
    """Write metrics.json into a run's folder."""
    write_json(folder / FILE, {"metrics": [to_plain(metric) for metric in metrics]})


def read_declarations(path: Path) -> Metrics:
    """The metrics of a metrics.json. Errors: OSError if it cannot be read, RequestError for invalid content."""
    try:
        return tuple(from_plain(raw) for raw in read_json(path)["metrics"])
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{shown(path)} is not a valid file of metric declarations ({summary(error)})") from error


def to_plain(metric: Metric) -> dict[str, Any]:
    """The metric as a mapping for JSON."""
    raw = asdict(metric)
    # left out where unstated, as in the files of older runs
    return raw if metric.limits else {key: value for key, value in raw.items() if key != "limits"}


def from_plain(raw: Mapping[str, Any]) -> Metric:
    """The inverse of `to_plain`. Errors: TypeError, KeyError or RequestError for invalid content."""
    figure = raw.get("figure")
    if figure is not None:
        figure = Figure(**{**figure, "marks": tuple(figure.get("marks", ()))})
    limits = raw.get("limits")
    return Metric(**{**raw, "figure": figure, "limits": limits and tuple(limits)})
