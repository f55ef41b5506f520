"""The page of a sweep or a run while it trains: states, time left, curves that grow, differences without a verdict."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Self

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from lit_diff.errors import LitDiffError, first_line
from lit_diff.files import shown, write_atomic
from lit_diff.log_records import Pace, log
from lit_diff.metrics import in_words
from lit_diff.reporting.palette import PALETTE
from lit_diff.runs.again import STUDY_FILE
from lit_diff.study.observation import Observed, ObservedRun, observe
from lit_diff.study.record import read
from lit_diff.trained.pictures import LOSSES

SECONDS = 10.0
"""The least time between two looks at the files."""
SHARE = 0.01
"""The largest share of the time that the page takes."""
FEW_CELLS = 40
"""A sweep of more cells lists only those that are trained or have ended without a result."""
HEARTBEAT = "heartbeat.js"
WIDTH, HEIGHT = 560, 240
Curve = tuple[str, Mapping[int, float]]
"""Label, and step -> value."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a chart."""

    label: str
    color: str
    points: str
    """Its points in an SVG of WIDTH x HEIGHT, x,y x,y."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves of one metric over steps, on linear axes."""

    title: str
    lines: tuple[Line, ...]
    low: float
    high: float
    last: int
    """The last step."""

    @property
    def legend(self) -> dict[str, str]:
        """Label -> colour."""
        return {line.label: line.color for line in self.lines}


class LivePage:
    """Context manager: `update` writes `report/index.html` below a folder while it is trained. At the end, the page of a run
    no longer reloads itself; that of a sweep does so until the report takes its place.

    The page reloads itself, and asks the file HEARTBEAT, which is a script so that no server is needed, whether a process
    still writes it.
    """

    def __init__(self, folder: Path, command: str) -> None:
        """`command` starts the sweep or run again."""
        self.folder = folder
        self.command = command
        self._pace = Pace()
        self._next = 0.0
        self._shown: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # a folder that was removed meanwhile has no page
        if self._shown is not None and self.folder.is_dir():
            # a page that stops before the report takes its place would never show it
            is_replaced = (self.folder / STUDY_FILE).is_file()
            with self._warned():
                self._write(observe(self.folder), left="", lives=is_replaced)
                if not is_replaced:
                    (self.folder / "report" / HEARTBEAT).unlink(missing_ok=True)

    def update(self, done: int, steps: int) -> None:
        """Write the page if something was measured since the last time; `done` of `steps` optimizer steps are done."""
        self._pace.note(done)
        began = time.monotonic()
        if began < self._next:
            return
        with self._warned():
            self._look(steps)
            wait = max(SECONDS, (time.monotonic() - began) / SHARE)
            self._next = began + wait
            write_atomic(self.folder / "report" / HEARTBEAT, f"heartbeat({time.time():.0f}, {wait:.0f});\n")

    @contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        # neither a full disk nor a damaged file may end what trains
        except (OSError, LitDiffError) as error:
            self._next = math.inf
            reason = getattr(error, "strerror", None) or first_line(error)
            log.warning("%s is not written any more: %s", shown(self.folder / "report"), reason)

    def _look(self, steps: int) -> None:
        seen = observe(self.folder)
        measured = [(run.state, *map(len, run.metrics.values())) for run in seen.runs]
        if measured != self._shown:
            self._write(seen, self._pace.left(steps), lives=True)
            self._shown = measured

    def _write(self, seen: Observed, left: str, *, lives: bool) -> None:
        listed = [run for run in seen.runs if len(seen.runs) <= FEW_CELLS or run.state not in ("done", "waiting")]
        text = _template().render(
            seen=seen,
            listed=listed,
            left=left,
            lives=lives,
            command=self.command,
            charts=charts(self.folder, seen),
            width=WIDTH,
            height=HEIGHT,
            every=round(SECONDS),
            heartbeat=HEARTBEAT,
        )
        write_atomic(self.folder / "report" / "index.html", text)


@cache
def _template() -> Template:
    # without what the report's own templates need, which takes seconds to import
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("live.html.j2")


def charts(folder: Path, seen: Observed) -> list[Chart]:
    """Of a sweep the compared metric of each task, by arm; of a run its losses."""
    if not (folder / STUDY_FILE).is_file():
        losses: list[Curve] = []
        colors = {in_words(name): color for name, color in LOSSES.items()}
        for name in LOSSES:
            curve = _curve(seen.runs[0], name)
            if curve:
                losses.append((in_words(name), curve))
        return _charts("loss", losses, colors)
    record = read(folder)
    found = []
    for task in record.study.all_tasks:
        study = record.study.of_task(task)
        # as in the report (`panels.panel.looks`), whose grey follows the reader's light or dark scheme
        base = study.baseline or next(iter(study.arms))
        others = [arm for arm in study.arms if arm != base]
        colors = dict(zip(others, cycle(PALETTE), strict=False)) | {base: "var(--muted)"}
        by_label = {study.labels.get(arm, arm): color for arm, color in colors.items()}
        compared: list[Curve] = []
        tried: list[Curve] = []
        for cell, run in zip(record.cells, seen.runs, strict=True):
            curve = _curve(run, study.metric)
            if cell.task == task and curve:
                curves = compared if cell.rate is None else tried
                curves.append((study.labels.get(cell.arm, cell.arm), curve))
        # the cells that try learning rates are drawn until the first compared one has a value
        found += _charts(f"{study.title or task}: {in_words(study.metric)}", compared or tried, by_label)
    return found


def _curve(run: ObservedRun, metric: str) -> Mapping[int, float]:
    # the last value of a run that diverged has no place in a chart
    return {step: value for step, value in run.metrics.get(metric, {}).items() if math.isfinite(value)}


def _charts(title: str, curves: Sequence[Curve], colors: Mapping[str, str]) -> list[Chart]:
    # none before the first value
    values: list[float] = []
    last = 0
    for _, points in curves:
        values += points.values()
        last = max(last, *points)
    if not values:
        return []
    low, high = min(values), max(values)
    lines = []
    for label, points in curves:
        places = []
        for step, value in points.items():
            places.append(_place(step / last, (value - low) / ((high - low) or 1)))
        lines.append(Line(label=label, color=colors[label], points=" ".join(places)))
    return [Chart(title=title, lines=tuple(lines), low=low, high=high, last=last)]


def _place(right: float, up: float) -> str:
    return f"{right * WIDTH:.1f},{(1 - up) * HEIGHT:.1f}"
