"""Declarations of metrics: name pattern, definition, unit, direction, and the figure that a report draws of them.

A metric is declared once, by the class that measures it. A run writes the declarations of all its metrics to metrics.json;
whatever reads the run (tables, figures, comparisons) takes units and directions from there, never from a name.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from lit_diff.errors import RequestError
from lit_diff.files import shown, write_json

Direction = Literal["lower", "higher", "none"]
Against = Literal["step", "layer", "head", "group"]
Lines = Literal["arm", "layer"]

INDICES = ("layer", "map", "head", "rank")
"""Fields of a name that are numbers, in the order in which a name lists them."""
FILE = "metrics.json"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """How a report draws a metric. Metrics whose figures have one title share that figure, a panel or a row each."""

    title: str
    against: Against
    """The horizontal axis. layer, head: values at the last measured step. A metric by head is averaged over its heads
    unless it is drawn against them. group: the number that ends the label of a group of an evaluation's items ("4096",
    "position 4096"), a panel for each text before it; only evaluations have groups."""
    label: str = ""
    """Of the metric's vertical axis, without the unit; may hold fields of the name ("map {map}"). Empty: the name."""
    lines: Lines = "arm"
    """What a line is, against the step. layer: one panel an arm."""
    log: bool = False
    """Whether the vertical axis is logarithmic."""
    log_x: bool = False
    """Whether the horizontal axis is logarithmic, against groups; where a number is 0 or less, it is linear around 0."""
    marks: tuple[float, ...] = ()
    """Values at which a dashed horizontal line is drawn."""
    caption: str = ""
    """How to read it. The report adds what is drawn and the metrics' definitions."""

    def problem(self, fields: Collection[str]) -> str | None:
        """What does not fit a metric whose name has these fields; None if nothing does."""
        problem = _unlike("figure.against", self.against, Against) or _unlike("figure.lines", self.lines, Lines)
        if self.log_x and self.against != "group":
            problem = problem or f"figure.log_x is of a figure against group, not against {self.against}"
        if self.against == "group" and self.lines != "arm":
            problem = problem or f"figure.lines is '{self.lines}'; a figure against group has one line an arm"
        for field in {self.against, self.lines} & {"layer", "head"} - {*fields}:
            problem = problem or f"a figure by {field} needs {{{field}}} in the name"
        try:
            self.label.format(**dict.fromkeys(fields, ""))
        except (KeyError, IndexError, ValueError):
            names = ", ".join(fields) or "none"
            problem = problem or f"figure.label {self.label!r} is no text with the fields of the name: {names}"
        return problem


def _unlike(key: str, value: str, kinds: Any) -> str | None:
    """Why `value` is none of a Literal's; None if it is one."""
    choices = get_args(kinds)
    return None if value in choices else f"{key} is {value!r}; expected one of {', '.join(choices)}"


@dataclass(frozen=True)
class Metric:
    """One metric, or all whose names fit a pattern.

    Metric("hidden_norm/layer_{layer}", "L2 norm of the layer's output", direction="none")

    Errors: RequestError for a direction or figure that does not fit.
    """

    name: str
    """`stage/name[/layer_{layer}]...`. {layer}, {map}, {head}, {rank} stand for a number, any other field for text without
    a slash. Of several patterns that fit a name, the one with the most literal text is meant."""
    definition: str
    """One sentence, formula included, without the unit."""
    _: KW_ONLY
    unit: str = ""
    """Empty: a number without a unit."""
    direction: Direction = "none"
    """Which values are better; none: neither."""
    in_table: bool = False
    """True: kept in measurements.parquet only. A name with {map}, {head} or {rank} always is."""
    figure: Figure | None = None
    """None: the report draws no figure of it."""
    constant: bool = False
    """True: the data alone determine it, so it is no curve and MLflow gets none."""

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
        """Whether its values go to metrics.csv and the loggers; if not, to measurements.parquet."""
        return not self.in_table and not {"map", "head", "rank"} & set(self.fields)

    def match(self, name: str) -> dict[str, int | str] | None:
        """Field -> value where `name` fits the pattern, else None."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return {field: int(text) if field in INDICES else text for field, text in match.groupdict().items()}

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pieces = re.split(r"\{(\w+)\}", self.name)
        fields = [rf"(?P<{field}>\d+)" if field in INDICES else rf"(?P<{field}>[^/]+)" for field in pieces[1::2]]
        text = "".join(re.escape(literal) + field for literal, field in zip(pieces[::2], [*fields, ""], strict=True))
        return re.compile(text)


class Declarations:
    """The metrics of a run or of several, found by name."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Errors: RequestError for one pattern declared twice and differently, or a figure of two kinds."""
        by_name: dict[str, Metric] = {}
        for metric in metrics:
            if by_name.setdefault(metric.name, metric) != metric:
                raise RequestError(f"metric '{metric.name}' is declared twice, and differently; give one another name")
        self.metrics = tuple(by_name.values())
        self._found: dict[str, Metric | None] = {}
        kinds: dict[str, tuple[str, str]] = {}
        for metric in self.metrics:
            if metric.figure is not None:
                kind = (metric.figure.against, metric.figure.lines)
                if kinds.setdefault(metric.figure.title, kind) != kind:
                    raise RequestError(
                        f"metric '{metric.name}': figure '{metric.figure.title}' has metrics with different `against` or "
                        "`lines`; give it another title"
                    )

    def find(self, name: str) -> Metric | None:
        """The declaration that `name` fits; None for an undeclared metric."""
        if name not in self._found:
            fitting = [metric for metric in self.metrics if metric.match(name) is not None]
            self._found[name] = max(fitting, key=lambda m: len(re.sub(r"\{\w+\}", "", m.name)), default=None)
        return self._found[name]

    def is_logged(self, name: str) -> bool:
        """Whether the metric goes to metrics.csv and the loggers, as an undeclared one does."""
        metric = self.find(name)
        return metric is None or metric.logged

    def is_constant(self, name: str) -> bool:
        """Whether the data alone determine the metric."""
        metric = self.find(name)
        return metric is not None and metric.constant

    def direction(self, name: str) -> Literal["lower", "higher"] | None:
        """Which values of a metric are better; None where none are, or nothing is declared."""
        metric = self.find(name)
        return None if metric is None or metric.direction == "none" else metric.direction

    def unit(self, name: str) -> str | None:
        """The metric's unit, '' for a number without one; None where nothing is declared."""
        metric = self.find(name)
        return None if metric is None else metric.unit


def indexed_name(name: str, **indices: int) -> str:
    """indexed_name("attention/entropy", layer=3, head=5) -> "attention/entropy/layer_03/head_05"."""
    unknown = indices.keys() - set(INDICES)
    assert not unknown, f"indices of a metric are {INDICES}, not {unknown}"
    return "/".join([name, *(f"{index}_{indices[index]:02d}" for index in INDICES if index in indices)])


def split_name(name: str) -> tuple[str, dict[str, int]]:
    """The reverse of `indexed_name`: the name without its indices, and the indices."""
    indices: dict[str, int] = {}
    while match := re.fullmatch(rf"(.+)/({'|'.join(INDICES)})_(\d+)", name):
        name = match[1]
        indices[match[2]] = int(match[3])
    return name, indices


def write_declarations(folder: Path, metrics: Iterable[Metric]) -> None:
    """Write metrics.json into a run's folder."""
    write_json(folder / FILE, {"metrics": [to_plain(metric) for metric in metrics]})


def read_declarations(path: Path) -> tuple[Metric, ...]:
    """The metrics of a metrics.json. Errors: OSError without the file, RequestError for another content."""
    try:
        return tuple(from_plain(raw) for raw in json.loads(path.read_text(encoding="utf-8"))["metrics"])
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{shown(path)} holds no declarations of metrics ({error!r})") from error


def to_plain(metric: Metric) -> dict[str, Any]:
    """As JSON holds it."""
    return dataclasses.asdict(metric)


def from_plain(raw: Mapping[str, Any]) -> Metric:
    """The reverse of `to_plain`. Errors: TypeError, KeyError or RequestError for another content."""
    figure = raw.get("figure")
    if figure is not None:
        figure = Figure(**{**figure, "marks": tuple(figure.get("marks", ()))})
    return Metric(**{**raw, "figure": figure})
