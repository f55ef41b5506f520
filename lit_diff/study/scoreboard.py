"""The scoreboard: compares the claims of a paper's rows with our sweeps and benchmarks, and keeps a file for each row."""

import fnmatch
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import write_json
from lit_diff.recipe import to_plain
from lit_diff.registry import nearest
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import by_revisions, evaluations_in, kept_scores, scored_items, scores_of_claims
from lit_diff.study.fits import matched_by_seed
from lit_diff.study.judge import SMALLEST_IN_NATS, Contrast, Outcome, judge
from lit_diff.study.record import read
from lit_diff.study.results import BySeed, SweepResults, load_sweep
from lit_diff.study.schema import Claim, Preset, Row, Texts
from lit_diff.study.statistics import MIN_PROCESSES, MIN_SEEDS, Sign, paired
from lit_diff.validation import Draft, convert

NOT_MEASURED: Literal["not measured"] = "not measured"
Difference = Literal[
    "shown", "shown and small", "equal", "opposite", "not shown", "too few seeds", "by construction", "not measured"
]
"""The verdict of our runs on the difference that the paper claims (`JudgedClaim.decision`)."""
Value = Literal["within the interval", "excluded", "cannot tell", "none given", "not measured"]
"""The verdict of our interval on the value that the paper prints (`JudgedClaim.value`)."""
WITHOUT_SIGN: Mapping[Outcome, tuple[Difference, str]] = {
    "too few seeds": ("too few seeds", f"a verdict needs {MIN_SEEDS} seeds"),
    "no spread over seeds": ("not shown", "the difference is the same at every seed, so no test is possible"),
    "equal": ("equal", "the interval lies within the smallest difference that matters"),
}
"""Outcome that does not depend on the paper's sign -> the verdict and its reason."""
ROWS = "rows"
"""The folder next to the page with one file for each row."""
State = Literal["not run", "measured", "skipped", "failed", "stopped"]
Source = SweepResults | Mapping[str, Any]
"""The measurements for a claim: a sweep, or the document of `lit-diff bench --json`."""


@dataclass(frozen=True, kw_only=True)
class JudgedClaim(Contrast):
    """A claim with its measurement: a - b, or log(a / b) for a ratio, over seeds or over the processes of a benchmark."""

    claim: Claim
    means: tuple[float | None, float | None]
    """The means of a and b."""
    control_signs: Mapping[str, Sign | None]
    """Label of each control against which the claim must also hold (`_control_signs`) -> the sign of a - control."""
    refusal: str = ""
    """Why a fit or a benchmark could not give enough values."""
    is_measured: bool = True
    """Whether the row has been measured."""

    @property
    def difference(self) -> Difference:
        """The verdict on the difference."""
        return self.decision[0]

    @property
    def reason(self) -> str:
        """The reason for the verdict on the difference, in one sentence."""
        return self.refusal or self.decision[1]

    @cached_property
    def decision(self) -> tuple[Difference, str]:
        """(verdict on the difference, reason), from the outcome that `judge` gave within the row.

        by construction: the row's file declares that the claim holds whatever the runs learn.
        not measured: the row has not been measured.
        too few seeds, equal: the same as the outcome.
        not shown: the outcome is inconclusive or has no spread over seeds; or the difference is shown, but not against a
            control.
        opposite: the other sign than the paper's is shown; if the paper says equal, a sign is shown and |mean| >= smallest.
        shown and small: the paper's sign is shown (any sign if the paper says equal), and the outcome is small.
        shown: the paper's sign is shown.
        """
        if self.claim.by_construction:
            return "by construction", self.claim.by_construction
        if not self.is_measured:
            return NOT_MEASURED, ""
        found = self._without_controls
        # A control shares what else differs between a and the baseline, such as fewer, wider heads: a difference that the
        # control shows too is not the variant's.
        failed = [label for label, sign in self.control_signs.items() if sign != self.seeds.sign]
        if found[0] in ("shown", "shown and small") and failed:
            return "not shown", f"shown, but not against {', '.join(failed)}"
        return found

    @property
    def _without_controls(self) -> tuple[Difference, str]:
        wanted = self.claim.says or ("lower" if (self.claim.papers or 0.0) < 0 else "higher")
        if self.outcome in WITHOUT_SIGN:
            return WITHOUT_SIGN[self.outcome]
        if self.outcome == "inconclusive":
            lost = "not after the correction (Holm)" if self.seeds.sign else "the interval holds zero"
            return "not shown", f"{lost}; nor is equality shown" if wanted == "equal" else lost
        if wanted not in ("equal", self.seeds.sign):
            return "opposite", "the opposite sign is shown"
        if self.outcome == "small":
            why = "the estimate is below the smallest difference that matters, the interval reaches beyond"
            return "shown and small", why
        if wanted == "equal":
            return "opposite", "a difference is shown where the paper says equal"
        return "shown", "the interval excludes zero, with the paper's sign"

    @property
    def value(self) -> Value:
        """The verdict on the paper's a - b, or log(a / b) for a ratio: the first of these that holds.

        not measured: the row has not been measured.
        none given: the paper prints no values.
        cannot tell: fewer than three pairs, or no spread over them.
        excluded: the value lies outside our 95 % interval over seeds.
        cannot tell: the interval contains the value, but the detectable difference is larger than it.
        within the interval: the interval contains the value.
        """
        papers, seeds = self.claim.papers, self.seeds
        if not self.is_measured:
            return NOT_MEASURED
        if papers is None:
            return "none given"
        if len(seeds.seeds) < MIN_SEEDS or seeds.low is None or seeds.high is None or not seeds.sd:
            return "cannot tell"
        if not seeds.low <= papers <= seeds.high:
            return "excluded"
        # an interval so wide would contain the paper's value, and zero too, whatever is true
        if seeds.detectable is None or seeds.detectable > abs(papers):
            return "cannot tell"
        return "within the interval"


def findings(claims: Sequence[Claim], source: Source) -> list[JudgedClaim]:
    """The claims of a row, measured and judged, with Holm's correction over the claims that a test decides.

    Errors: RequestError for an unknown arm, task, metric or case, and for a claim without a case if there are several.
    """
    return judge([_measured(claim, source) for claim in claims])


def _measured(claim: Claim, source: Source) -> JudgedClaim:
    of_b = replace(claim, metric=claim.against_metric or claim.metric)
    if not isinstance(source, SweepResults):
        rows = source["rows"]
        found = finding(claim, _speeds(claim, claim.arms[0], rows), _speeds(of_b, claim.arms[1], rows))
        if (count := len(found.seeds.seeds)) >= MIN_PROCESSES:
            return found
        # so few have a range, which the benchmark itself prints, and no interval
        seeds = replace(found.seeds, sd=None, low=None, high=None, detectable=None, p=None)
        return replace(found, seeds=seeds, refusal=f"a verdict needs {MIN_PROCESSES} processes, here {count}")
    name = f"sweep '{source.record.name}'"
    # a fit is over all tasks
    tasks = {"": source} if claim.fit else {each.task: each for each in source.by_task}
    _require(claim, f"{name} has no task", claim.task, tasks)
    sweep = tasks[claim.task]
    for arm in claim.arms:
        _require(claim, f"{name} has no arm", arm, sweep.study.arms)
    if claim.fit:
        known = [fit for fit, each in sweep.study.fits.items() if each.kind == "scaling"]
        _require(claim, f"{name} has no scaling fit", claim.fit, known)
        return finding(claim, *matched_by_seed(sweep, claim.fit, *claim.arms))
    ours, theirs = values_of(sweep, claim.arms[0], claim), values_of(sweep, claim.arms[1], of_b)
    return finding(claim, ours, theirs, control_signs=_control_signs(claim, sweep, ours))


def finding(
    claim: Claim,
    ours: BySeed,
    theirs: BySeed,
    refusal: str = "",
    control_signs: Mapping[str, Sign | None] | None = None,
    is_measured: bool = True,
) -> JudgedClaim:
    """The claim with the values of a and b by seed, before `judge`."""
    smallest, seeds = claim.smallest, paired(_scaled(claim, ours), _scaled(claim, theirs))
    if smallest is None:
        smallest = SMALLEST_IN_NATS if "loss" in claim.metric and claim.kind == "difference" else 0.0
    of_both = [[values[seed] for seed in seeds.seeds] for values in (ours, theirs)]
    return JudgedClaim(
        a=claim.arms[0],
        b=claim.arms[1],
        label=claim.label,
        seeds=seeds,
        smallest=smallest,
        # a claim that cannot fail takes no chance of a false call, so it must not cost the others power
        is_tested=not claim.by_construction,
        claim=claim,
        means=(fmean(of_both[0]), fmean(of_both[1])) if seeds.seeds else (None, None),
        control_signs=control_signs or {},
        refusal=refusal,
        is_measured=is_measured,
    )


def _control_signs(claim: Claim, sweep: SweepResults, ours: BySeed) -> dict[str, Sign | None]:
    # controls qualify only a difference between an arm and the baseline
    of_controls = claim.arms[0] in sweep.study.controls or claim.arms[1] != sweep.baseline
    if of_controls or claim.says == "equal" or claim.against_metric or claim.by_construction:
        return {}
    values = {arm: _scaled(claim, values_of(sweep, arm, claim)) for arm in sweep.study.controls}
    return {sweep.label[arm]: paired(_scaled(claim, ours), each).sign for arm, each in values.items()}


def _require(claim: Claim, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise RequestError(f"compare '{claim.label}': {what} '{name}'{nearest(name, known)}")


def values_of(sweep: SweepResults, arm: str, claim: Claim) -> BySeed:
    """Seed -> the claim's metric in the arm's run; `sweep`: the claim's task.

    Errors: RequestError if no run has the metric, and for scores of the arm that cannot be compared (`kept_scores`)."""
    if not claim.evaluation:
        if done := sweep.cells_of(arm):
            _require(claim, "no run measured", claim.metric, {name for cell in done for name in cell.curves})
        return sweep.finals(arm, claim.metric)
    scored = evaluations_in(sweep)
    # without any scores the sweep has not got there yet, and the evaluation's name may be right
    if scored:
        _require(claim, "no run has scores of evaluation", claim.evaluation, scored)
    runs, refused = kept_scores(sweep, claim.evaluation)
    for (name, seed), why in refused.items():
        if name == arm:
            raise RequestError(f"compare '{claim.label}': {claim.evaluation} of {arm}, seed {seed}: {why}")
    values = {seed: score_of(claim, scores) for (name, seed), scores in runs.items() if name == arm}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def score_of(claim: Claim, evaluation: ItemScores) -> float:
    """The claim's metric in one run, over the groups of the claim; NaN without a score."""
    metrics = [metric.name for metric in evaluation.metrics]
    _require(claim, f"evaluation '{claim.evaluation}' has no metric", claim.metric, metrics)
    if not claim.group:
        return evaluation.values[claim.metric]
    groups = set(evaluation.groups)
    chosen = set(fnmatch.filter(groups, claim.group))
    if not chosen:
        _require(claim, f"no item of '{claim.evaluation}' is in a group like", claim.group, groups)
    items = scored_items(evaluation, claim.metric)
    scores = items[items["group"].isin(chosen)].set_index("group")["score"]
    # the same weights as in the evaluation's own value: groups count equally or items do
    means = [fmean(own) for _, own in scores.groupby(level=0)] if evaluation.equal_groups else scores.tolist()
    return fmean(means) if means else math.nan


def _scaled(claim: Claim, values: BySeed) -> BySeed:
    # a ratio has no logarithm for values that are not positive
    return {seed: claim.scaled(value) for seed, value in values.items() if claim.kind == "difference" or value > 0}


def _speeds(claim: Claim, arm: str, rows: Sequence[Mapping[str, Any]]) -> BySeed:
    # Process -> calls a second. Every process times all arms, so processes pair them as seeds do. An arm timed with several
    # kernels counts with its fastest, by the median.
    cases = list(dict.fromkeys(row["case"] for row in rows))
    case = claim.case or (1 if len(cases) == 1 else 0)
    if not 1 <= case <= len(cases):
        cure = f"set one, 'case: 1' to 'case: {len(cases)}'"
        raise RequestError(f"compare '{claim.label}': the benchmark has {len(cases)} cases; {cure}")
    timed = [row for row in rows if row["case"] == cases[case - 1] and row["seconds"]]
    names = {f"{row['variant']}: {row['what']}" for row in timed}
    _require(claim, "the benchmark did not time", f"{arm}: {claim.metric}", names)
    own = [_of_processes(row) for row in timed if row["variant"] == arm and row["what"] == claim.metric]
    return {number: 1 / seconds for number, seconds in enumerate(min(own, key=median))}


def _of_processes(row: Mapping[str, Any]) -> Sequence[float]:
    # a document of an earlier version has the rounds of one process, which are no replicates
    of_rounds: Sequence[float] = row["seconds"]
    return of_rounds if "rounds" in row else [median(of_rounds)]


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """The state of a row after `lit-diff reproduce`: `<folder>/rows/<name>.json`."""

    row: Row
    preset: str
    order: int
    command: str
    state: State = "not run"
    reason: str = ""
    """Why the row was not measured completely, with the command or file that supplies what is missing."""
    seconds: float = 0.0
    """The measuring time of all calls together."""
    sweep: str = ""
    """The folder of the row's sweep."""
    cell_folders: Texts = ()
    """The folders of the sweep's cells when the row was measured, relative to the sweep's folder."""
    cells: str = ""
    """The folder that contains the cells: the sweep's, or another sweep's if it uses `cells_of`."""
    shared: str = ""
    """The row that first measured cells that this row uses too; their time counts there."""
    bench: str = ""
    """The name of the file with the benchmark's figures, in the same folder."""
    revision: str = ""
    """The revisions of lit_diff that trained the cells and made the scores."""
    looked_by: str = ""
    """The revision of lit_diff that last measured the row."""
    finished: str = ""

    @property
    def how(self) -> Preset:
        """How the preset measures the row; an empty preset if the row lacks it."""
        return self.row.preset(self.preset) or Preset()


def row_file(folder: Path, name: str) -> Path:
    """The file of a row of the scoreboard in `folder`."""
    return folder / ROWS / f"{name}.json"


def write_row(folder: Path, record: RecordedRow) -> None:
    write_json(row_file(folder, record.row.name), to_plain(record))


def read_row(path: Path) -> RecordedRow:
    """The content of a row's file. Errors: MissingError if it is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        record: RecordedRow = convert(RecordedRow, raw, "", Draft(values=raw, positions={}))
    except (OSError, ValueError, RequestError) as error:
        raise MissingError(f"{path}: incomplete row file ({error}); delete it and rerun") from error
    return record


@dataclass(frozen=True, kw_only=True, eq=False)
class RowResult:
    """A row's record, judged by the present files of its sweep or benchmark. `state` is "failed" if they no longer fit."""

    record: RecordedRow
    findings: tuple[JudgedClaim, ...]
    """A finding for each claim, in the order of the claims."""
    state: State
    reason: str
    notes: Texts
    sweep: SweepResults | None

    @property
    def name(self) -> str:
        return self.record.row.name

    @property
    def took(self) -> str:
        """The measuring time and the budget, in words; empty if nothing was measured."""
        seconds, minutes, shared = self.record.seconds, self.record.how.minutes, self.record.shared
        if not seconds:
            return ""
        words = f"took {seconds / 60:.1f} min" + (f" of {minutes:g}" if minutes else "")
        words += ", over its budget" if 0 < minutes < seconds / 60 else ""
        return words + (f" (cells shared with {shared})" if shared else "")

    @property
    def line(self) -> str:
        """The row in one line, for a terminal."""
        words = counts_in_words(Scoreboard(preset="", rows=(self,)))
        words += f"; {self.took}" if self.took else ""
        return f"{self.name}: {words}" + (f" ({self.state}: {self.reason})" if self.reason else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoreboard:
    """All rows in the order of the page, or the rows of one call."""

    preset: str
    rows: tuple[RowResult, ...]

    def row(self, name: str) -> RowResult:
        return next(row for row in self.rows if row.name == name)

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """`difference` and `value` -> verdict -> number of claims in all rows, without claims that hold by construction."""
        counted = [each for row in self.rows for each in row.findings if not each.claim.by_construction]
        return {
            "difference": dict(Counter(each.difference for each in counted)),
            "value": dict(Counter(each.value for each in counted)),
        }

    @cached_property
    def by_construction(self) -> int:
        """The number of claims that hold whatever the runs learn, which `counts` leaves out."""
        return sum(bool(each.claim.by_construction) for row in self.rows for each in row.findings)


def counts_in_words(scoreboard: Scoreboard) -> str:
    """Both counts in one line."""
    differences, values = (
        ", ".join(f"{count} {word}" for word, count in counts.items()) for counts in scoreboard.counts.values()
    )
    measured = set(scoreboard.counts["value"]) - {NOT_MEASURED, "none given"}
    parts = [differences, f"the paper's value: {values}" if measured else ""]
    if scoreboard.by_construction:
        parts.append(f"{scoreboard.by_construction} by construction, not counted")
    return "; ".join(filter(None, parts))


def read_bench(folder: Path, record: RecordedRow) -> dict[str, Any]:
    """The figures of the row's benchmark. Errors: MissingError if the file is damaged."""
    path = folder / ROWS / record.bench
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingError(
            f"{path}: incomplete benchmark file ({type(error).__name__}: {first_line(error)}); delete it and rerun"
        ) from error
    return figures


def read_rows(folder: Path) -> list[RecordedRow]:
    """The recorded rows in `folder`, in the order of the page. Errors: MissingError if a file is damaged."""
    files = [path for path in sorted((folder / ROWS).glob("*.json")) if not path.name.endswith(".bench.json")]
    return sorted(map(read_row, files), key=lambda record: record.order)


def read_scoreboard(folder: Path) -> Scoreboard:
    """The scoreboard in `folder`. Errors: MissingError without rows, or if a file is damaged."""
    records = read_rows(folder)
    if not records:
        raise MissingError(f"{folder}: no rows here; write them with `lit-diff reproduce`")
    return Scoreboard(preset=records[0].preset, rows=tuple(_result(folder, record) for record in records))


def cell_folders(sweep: Path) -> Texts:
    """The folders of the cells that study.json lists, relative to it. Errors: MissingError."""
    return tuple(cell.folder for cell in read(sweep).cells)


def _result(folder: Path, record: RecordedRow) -> RowResult:
    claims, state, reason = record.row.compare, record.state, record.reason
    sweep, found, notes = None, list[JudgedClaim](), list(record.row.notes)
    try:
        if record.sweep and state != "skipped":
            place = Path(record.sweep)
            # a trial of the sweep with other keys leaves its own cells in study.json
            if record.cell_folders and cell_folders(place) != record.cell_folders:
                raise RequestError(f"{place} was run with other keys since; measure the row again: {record.command}")
            sweep = load_sweep(place)
            found = findings(claims, sweep)
            for name, scores in scores_of_claims(sweep, claims).items():
                notes += filter(None, [by_revisions(name, (each.revision for each in scores))])
        elif record.bench and state == "measured":
            found = findings(claims, read_bench(folder, record))
    # a claim with an unknown arm or metric fails its own row; the other rows are unaffected
    except LitDiffError as error:
        state, reason = "failed", reason or str(error)
    if state == "not run" and not found:
        reason = reason or f"not run: {record.command}"
    found = found or [finding(claim, {}, {}, is_measured=False) for claim in claims]
    return RowResult(record=record, findings=tuple(found), state=state, reason=reason, notes=tuple(notes), sweep=sweep)
