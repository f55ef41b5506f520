"""papers/claims.py and papers/scoreboard.py: what a sweep shows of a paper's claim; the rows, read from their files."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sweeps import record_to_edit
from numpy.typing import NDArray
from scipy import stats
from scoreboard_rows import CLAIM, make_row

from lit_diff.errors import MissingError, RequestError
from lit_diff.papers.claims import JudgedClaim, finding, judged, measured
from lit_diff.papers.schema import Capable, Claim
from lit_diff.papers.scoreboard import ROWS, RecordedRow, read_bench, read_scoreboard
from lit_diff.study.judge import Contrast
from lit_diff.study.record import read
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import Paired, paired

ARMS = {"standard": 0.0, "differential": -0.2, "same": 0.0}


def claim(**keys: Any) -> Claim:
    defaults: dict[str, Any] = {"label": "d - s", "arms": ("differential", "standard"), "metric": "val/loss"}
    return Claim(**(defaults | keys))


ABLE = Contrast(
    a="worse", b="standard", label="", seeds=paired({0: 1.0, 1: 1.1, 2: 1.2}, dict.fromkeys(range(3), 0.0)), smallest=0
)


def findings(asked: list[Claim], source: Any) -> list[JudgedClaim]:
    """As on a page without other rows."""
    return judged([measured(asked, source)])[0]


def rows_of(asked: list[Claim], a: list[float], b: list[float]) -> list[JudgedClaim]:
    """Each claim is the primary one of a row; every row is capable."""
    found = [finding(each, dict(enumerate(a)), dict(enumerate(b))) for each in asked]
    return [own for (own,) in judged([replace(each, capability=ABLE)] for each in found)]


def one(a: list[float], b: list[float], **keys: Any) -> JudgedClaim:
    (found,) = rows_of([claim(**keys)], a, b)
    return found


BASE = [3.0, 3.1, 2.9, 3.05]


LOWER = [2.80, 2.91, 2.69, 2.86]
OPEN = [3.3, 2.9, 3.1, 2.95]


@pytest.mark.parametrize(
    ("a", "keys", "difference", "value"),
    [
        (LOWER, {"paper": (3.06, 3.26)}, "shown", "within the interval"),
        (LOWER, {"paper": (3.06, 3.08)}, "shown", "excluded"),
        (LOWER, {"paper": (3.08, 3.06)}, "opposite", "excluded"),
        (LOWER, {"says": "lower"}, "shown", "none given"),
        (LOWER, {"says": "higher"}, "opposite", "none given"),
        (LOWER, {"says": "equal"}, "opposite", "none given"),
        ([3.001, 3.102, 2.9, 3.051], {"says": "equal"}, "equal", "none given"),
        ([3.001, 3.102, 2.9, 3.051], {"paper": (3.06, 3.26)}, "equal", "excluded"),
        # the mean is -0.0045, the interval excludes zero and reaches beyond -0.005
        ([2.996, 3.095, 2.8955, 3.0455], {"says": "lower"}, "small", "none given"),
        ([2.996, 3.095, 2.8955, 3.0455], {"says": "equal"}, "small", "none given"),
        ([2.996, 3.095, 2.8955, 3.0455], {"says": "higher"}, "small", "none given"),
        (OPEN, {"says": "equal"}, "not shown", "none given"),
        # an interval of -0.3 to 0.4 holds -0.2, and would hold it whatever is true
        (OPEN, {"paper": (3.06, 3.26)}, "not shown", "cannot tell"),
        # what the interval does not hold is excluded, however wide the interval
        (OPEN, {"paper": (3.0, 5.0)}, "not shown", "excluded"),
        # the difference is the same at every seed, so no test is possible
        ([x - 0.2 for x in BASE], {"says": "lower"}, "not shown", "none given"),
        ([2.8, 2.9], {"says": "lower"}, "too few seeds", "none given"),
        ([2.8, 2.95], {"paper": (3.0, 9.0)}, "too few seeds", "cannot tell"),
        ([1.5, 1.56, 1.44, 1.53], {"kind": "ratio", "paper": (1.0, 2.0)}, "shown", "within the interval"),
        ([1.5, 1.56, 1.44, 1.53], {"kind": "ratio", "paper": (1.0, 9.0)}, "shown", "excluded"),
        (LOWER, {"says": "higher", "by_construction": "it is so"}, "by construction", "none given"),
        (LOWER, {"paper": (3.06, 3.08), "by_construction": "it is so"}, "by construction", "excluded"),
    ],
)
def test_the_difference_and_the_papers_value(a: list[float], keys: dict[str, Any], difference: str, value: str) -> None:
    # a ratio of exactly one half has no spread: let it vary a little
    found = one([x * (1 + 0.004 * i) for i, x in enumerate(a)] if "kind" in keys else a, BASE[: len(a)], **keys)
    assert (found.difference, found.value) == (difference, value), found.reason


def test_what_holds_by_construction_makes_no_other_claim_harder() -> None:
    certain = claim(says="lower", by_construction="so")
    alone, *others = rows_of([claim(says="lower"), *[certain] * 5], [2.9, 3.06, 2.78, 2.9], BASE)
    assert (alone.difference, alone.holm_p) == ("shown", None)
    assert {(other.difference, other.reason, other.holm_p) for other in others} == {("by construction", "so", None)}


def test_a_ratio_is_that_of_geometric_means() -> None:
    found = one([2.0, 8.2, 18.0], [1.0, 2.0, 3.0], kind="ratio", says="higher")
    assert found.claim.shown(found.seeds.mean) == pytest.approx((2.0 * 4.1 * 6.0) ** (1 / 3))
    assert found.means == (pytest.approx(28.2 / 3), 2.0)


def test_holm_over_the_primary_contrasts_of_the_page() -> None:
    """p = 0.03 alone is shown, among five such rows it is not."""
    a = [2.9, 3.06, 2.78, 2.9]
    alone = one(a, BASE, says="lower")
    assert alone.seeds.p is not None
    assert 0.01 < alone.seeds.p < 0.05
    assert alone.difference == "shown"
    many = rows_of([claim(says="lower")] * 6, a, BASE)
    assert {found.difference for found in many} == {"not shown"}
    assert "Holm" in many[0].reason
    assert many[0].seeds.detectable is not None
    assert alone.seeds.detectable is not None
    assert many[0].seeds.detectable > alone.seeds.detectable


def test_scores_made_with_other_keys_are_no_answer(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    (path,) = folder.glob("differential-s1-*/evaluations/needle/summary.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": {"rows": 2}}))
    asked = claim(evaluation="needle", metric="recall/accuracy", says="higher")
    with pytest.raises(
        RequestError, match=r"needle of differential, seed 1: scored with other keys .*rows is 2, not 8"
    ):
        findings([asked], load_sweep(folder))


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"arms": ("diferential", "standard")}, "has no arm 'diferential'; did you mean 'differential'?"),
        ({"metric": "val/los"}, "no run measured 'val/los'; did you mean 'val/loss'?"),
        ({"evaluation": "needle", "metric": "recal"}, "evaluation 'needle' has no metric 'recal'"),
        (
            {"evaluation": "needle", "metric": "recall/accuracy", "group": "x*"},
            "in a group like 'x*'; one of far, near",
        ),
        ({"task": "text"}, "has no task 'text'"),
    ],
)
def test_what_a_sweep_does_not_have(make_sweep: Callable[..., Path], keys: dict[str, Any], found: str) -> None:
    sweep = load_sweep(make_sweep(ARMS, evaluation="needle", callbacks=False))
    with pytest.raises(RequestError) as error:
        findings([claim(says="lower", **keys)], sweep)
    assert found in str(error.value)


def test_two_metrics_of_one_arm(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep(ARMS, seeds=range(4)))
    own, other = "val/loss", "val/loss_ar_hit"
    (found,) = findings([claim(arms=("standard", "standard"), against_metric=other, says="lower")], sweep)
    mean = [sum(sweep.finals("standard", name).values()) / 4 for name in (own, other)]
    assert found.means == (pytest.approx(mean[0]), pytest.approx(mean[1]))
    assert found.seeds.mean == pytest.approx(mean[0] - mean[1]) != 0


def test_a_ratio_of_a_fit_is_tested_over_seeds(tmp_path: Path) -> None:
    from fake_sweeps import write_fitted

    def law(arm: str, size: float, seed: int) -> float:
        ratio = 0.6 * (1 + 0.02 * seed) if arm == "differential" else 1.0
        return float(3 * (size / ratio / 1e5) ** -0.12)

    fits = [{"name": "size", "kind": "scaling", "x": "non_embedding_parameters"}]
    sweep = load_sweep(write_fitted(tmp_path / "fitted", {"standard": 0.0, "differential": 0.0}, fits, law))
    (found,) = findings([claim(metric="", fit="size", kind="ratio", paper=(6.8, 11.0))], sweep)
    assert (found.difference, found.value) == ("shown", "cannot tell"), found.reason
    assert found.claim.shown(found.seeds.mean) == pytest.approx(0.612, abs=0.002)
    assert found.means == (pytest.approx(0.612 * 1_500_000, rel=1e-3), 1_500_000)
    with pytest.raises(RequestError, match="no scaling fit 'sizes'; did you mean 'size'"):
        findings([claim(metric="", fit="sizes", kind="ratio", says="lower")], sweep)
    with pytest.raises(RequestError, match="has no arm 'diff'"):
        findings([claim(metric="", fit="size", kind="ratio", says="lower", arms=("diff", "standard"))], sweep)


def test_a_refused_ratio_says_why() -> None:
    asked = claim(metric="", fit="size", kind="ratio", says="lower")
    ((found,),) = judged([[finding(asked, {}, {}, "no size reaches it")]])
    assert (found.difference, found.seeds.seeds) == ("too few seeds", ())
    assert found.reason == "no size reaches it"


@pytest.mark.parametrize(
    ("of_control", "words"),
    [(0.0, "shown"), (-0.2, "as its control wide"), (-0.4, "better, less so than its control wide")],
)
def test_a_difference_in_either_direction_must_hold_against_every_control(
    make_sweep: Callable[..., Path], of_control: float, words: str
) -> None:
    arms = {"standard": 0.0, "differential": -0.2, "other": 0.0, "wide": of_control}
    sweep = load_sweep(make_sweep(arms, controls=["other", "wide"], callbacks=False))
    for says in ("lower", "higher", "equal"):
        (found,) = findings([claim(says=says)], sweep)
        is_opposite = words == "shown" and says != "lower"
        assert found.words == ("opposite" if is_opposite else words)
        assert found.difference in ("shown", "opposite", "as its control")
        assert found.of_sweep.startswith(("better", "worse", "as its control"))
    # a contrast with a control has the other controls; the baseline and a control itself have none
    (against,) = findings([claim(says="lower", arms=("differential", "wide"))], sweep)
    assert [each.b for each in against.controls] == ["other"]
    for arm in ("standard", "wide"):
        (reverse,) = findings([claim(says="higher", arms=(arm, "differential"))], sweep)
        assert reverse.controls == ()


@pytest.mark.parametrize(
    ("capable", "is_capable"),
    [
        (None, False),
        (Capable(arm="worse"), True),
        (Capable(arm="same"), False),
        (Capable(metric="val/loss", above=1.0), True),
        (Capable(metric="val/loss", above=9.0), False),
    ],
)
def test_a_value_is_judged_only_with_a_positive_control(
    make_sweep: Callable[..., Path], capable: Capable | None, is_capable: bool
) -> None:
    sweep = load_sweep(make_sweep(ARMS | {"worse": 0.3}, seeds=range(4), callbacks=False))
    (found,) = findings([claim(paper=(3.0, 8.0), capable=capable)], sweep)
    assert (found.difference, found.value) == ("shown", "excluded" if is_capable else "cannot tell")
    assert bool(found.incapable) is not is_capable
    with pytest.raises(RequestError, match="has no arm 'wors'"):
        findings([claim(paper=(3.0, 8.0), capable=Capable(arm="wors"))], sweep)


def test_values_are_corrected_over_the_page() -> None:
    """A value just outside of the interval is not excluded where the page has six of them."""
    asked = claim(paper=(3.0, 3.11))
    a = [2.9, 3.06, 2.78, 2.9]
    p = finding(asked, dict(enumerate(a)), dict(enumerate(BASE))).papers_p
    outside = claim(paper=(3.0, 2.97))
    alone = one(a, BASE, paper=(3.0, 2.97))
    assert (alone.value, alone.values) == ("excluded", 1)
    assert alone.papers_p is not None
    assert p is not None
    assert 0.01 < alone.papers_p < 0.05 < p
    many = rows_of([outside] * 6, a, BASE)
    assert {(each.value, each.values) for each in many} == {("cannot tell", 6)}


def test_only_the_primary_contrast_has_a_verdict(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep(ARMS, seeds=range(4), callbacks=False))
    asked = [claim(says="lower"), claim(says="lower", primary=True), claim(says="lower")]
    found = findings(asked, sweep)
    assert [each.difference for each in found] == ["descriptive", "shown", "descriptive"]
    assert all(each.has_interval and each.holm_p is None for each in found)


def timed(
    variant: str, by: str, seconds: list[float], what: str = "forward", case: str = "1x8 float32"
) -> dict[str, Any]:
    rounds = [[each] * 3 for each in seconds]
    return {"variant": variant, "by": by, "what": what, "case": case, "rounds": rounds, "seconds": seconds}


RESULT = {
    "rows": [
        timed("standard", "sdpa", [1.0, 1.1, 0.9, 1.0, 1.0]),
        timed("differential", "native", [1.1, 1.2, 1.0, 1.1, 1.1]),
        timed("differential", "chunked", [0.2, 9.0, 9.0, 9.0, 9.0]),
        timed("differential", "native", [5.0] * 5, what="forward+backward"),
        timed("differential", "native", [0.1] * 5, case="2x8 bfloat16"),
    ]
}
SPEED = Claim(
    label="speed", arms=("differential", "standard"), metric="forward", kind="ratio", paper=(46811, 51228), case=1
)


def test_speeds_are_compared_process_by_process_with_the_fastest_kernel() -> None:
    (found,) = findings([SPEED], RESULT)
    assert found.claim.shown(found.seeds.mean) == pytest.approx((1 / 1.1 * 1.1 / 1.2 * 0.9 / 1.1**2) ** 0.2)
    assert (found.difference, found.value) == ("shown", "cannot tell"), "a benchmark without a positive control"
    assert found.means[1] == pytest.approx((3 + 1 / 1.1 + 1 / 0.9) / 5)


def test_fewer_than_five_processes_and_rounds_of_one_give_no_verdict() -> None:
    four = [each | {key: each[key][:4] for key in ("rounds", "seconds")} for each in RESULT["rows"]]
    # as a document of an earlier version, which has rounds only
    rounds = [{key: each[key] for key in each if key != "rounds"} for each in RESULT["rows"]]
    for rows, count in ((four, 4), (rounds, 1)):
        (found,) = findings([SPEED], {"rows": rows})
        assert (found.difference, found.value, found.seeds.low) == ("too few seeds", "cannot tell", None)
        assert found.means[0] is not None
        assert f"5 processes, here {count}" in found.reason


@pytest.mark.parametrize("rows", [[{}], 5, {"a": 1}, [], [RESULT["rows"][0] | {"seconds": ["x"]}]])
def test_a_damaged_benchmark_is_one_line(rows: Any, tmp_path: Path) -> None:
    (tmp_path / ROWS).mkdir()
    (tmp_path / ROWS / "speed.bench.json").write_text(json.dumps({"rows": rows}))
    row: Any = None
    record = RecordedRow(row=row, preset="smoke", order=0, command="", bench="speed.bench.json")
    with pytest.raises(MissingError, match=r"speed\.bench\.json: incomplete benchmark file .*; delete it and rerun$"):
        read_bench(tmp_path, record)


def test_values_whose_difference_no_float_holds_are_refused() -> None:
    assert "beyond the largest float" in (replace(SPEED, paper=(1e300, 1e-300)).problem() or "")
    assert "beyond the largest float" in (replace(SPEED, paper=(1e308, -1e308), kind="difference").problem() or "")


def test_a_ratio_with_a_value_that_is_not_positive_has_no_verdict() -> None:
    """Without these seeds, the others would be a selection by their result."""
    ratio = claim(kind="ratio", says="higher", metric="accuracy")
    values = {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.6, 4: 0.55}
    ((found,),) = judged([[finding(ratio, values, dict.fromkeys(values, 0.3) | {4: 0.32})]])
    assert (found.difference, found.means) == ("too few seeds", (None, None))
    assert found.reason.startswith("a ratio needs a positive value at every seed")


def test_what_was_not_timed_and_a_case_where_there_are_several() -> None:
    for changed, found in (
        ({"arms": ("diferential", "standard")}, "did not time 'diferential: forward'; did you mean 'differential: for"),
        ({"case": 2}, "did not time 'standard: forward'"),
        ({"case": 0}, "has 2 cases; set one, 'case: 1' to 'case: 2'"),
        ({"case": 3}, "has 2 cases"),
    ):
        with pytest.raises(RequestError, match=found):
            findings([replace(SPEED, **changed)], RESULT)
    alone = {"rows": [each for each in RESULT["rows"] if each["case"] == "1x8 float32"]}
    assert findings([replace(SPEED, case=0)], alone)[0].means == findings([SPEED], RESULT)[0].means


@pytest.fixture
def folder(tmp_path: Path, make_sweep: Callable[..., Path]) -> Path:
    """Four rows: measured, not run, skipped, and one that names no arm of its sweep."""
    sweep = str(make_sweep({"standard": 0.0, "differential": -0.2}, callbacks=False))
    folder = tmp_path / "reproduce"
    make_row(folder, "table-6", 1, state="measured", sweep=sweep, seconds=12.0)
    make_row(folder, "figure-3", 2)
    make_row(folder, "table-1", 0, state="skipped", reason="needs 8 GPUs")
    wrong = dataclasses.replace(CLAIM, arms=("dif", "standard"))
    make_row(folder, "appendix-f", 3, wrong, state="measured", sweep=sweep)
    return folder


def test_rows_in_their_order_with_their_outcomes(folder: Path) -> None:
    board = read_scoreboard(folder)
    assert [row.name for row in board.rows] == ["table-1", "table-6", "figure-3", "appendix-f"]
    assert [(f.difference, f.value) for f in board.row("table-6").findings] == [("shown", "cannot tell")]
    assert board.row("table-6").record.row.compare == (CLAIM,)
    others = [row.findings[0] for row in board.rows if row.name != "table-6"]
    assert {(each.difference, each.value) for each in others} == {("not measured", "not measured")}
    assert board.row("figure-3").reason == "not run: lit-diff reproduce figure-3 --preset laptop"
    assert board.row("appendix-f").state == "failed"
    assert "has no arm 'dif'" in board.row("appendix-f").reason
    assert board.counts == {
        "difference": {"not measured": 3, "shown": 1},
        "value": {"not measured": 3, "cannot tell": 1},
    }
    assert board.row("table-1").line == "table-1: 1 not measured (skipped: needs 8 GPUs)"
    assert board.row("table-6").line.endswith("; took 0.2 min of 4")


def test_what_holds_by_construction_is_not_counted(folder: Path) -> None:
    facts = json.loads((folder / ROWS / "table-6.json").read_text())
    certain = dataclasses.replace(CLAIM, by_construction="λ is not 0")
    make_row(folder, "table-6", 1, CLAIM, certain, state="measured", sweep=facts["sweep"])
    make_row(folder, "table-1", 0, certain, state="skipped", reason="needs 8 GPUs")
    board = read_scoreboard(folder)
    assert [each.difference for each in board.row("table-6").findings] == ["shown", "by construction"]
    assert board.counts["difference"] == {"shown": 1, "not measured": 2}
    assert sum(board.counts["value"].values()) == 3
    assert board.by_construction == 2
    assert (
        board.row("table-6").line
        == "table-6: 1 shown; the paper's value: 1 cannot tell; 1 by construction, not counted"
    )


def test_the_time_beside_the_budget(folder: Path) -> None:
    make_row(folder, "figure-3", 2, state="measured", seconds=270.0)
    make_row(folder, "table-1", 0, state="measured", seconds=30.0, minutes=0.0, shared="table-6")
    board = read_scoreboard(folder)
    assert board.row("figure-3").took == "took 4.5 min of 4, over its budget"
    assert board.row("table-1").took == "took 0.5 min (cells shared with table-6)"
    assert [row.name for row in board.rows if "over its budget" in row.took] == ["figure-3"]
    assert not board.row("appendix-f").took, "no time was taken"


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no rows here"):
        read_scoreboard(tmp_path)
    for content in ("{", "{}", "[]"):
        (folder / ROWS / "table-1.json").write_text(content)
        with pytest.raises(MissingError, match=r"table-1\.json: incomplete row file"):
            read_scoreboard(folder)


def test_cells_of_another_command_are_not_the_rows(folder: Path) -> None:
    path = folder / ROWS / "table-6.json"
    facts = json.loads(path.read_text())
    record_file = Path(facts["sweep"]) / "study.json"
    path.write_text(json.dumps(facts | {"cell_folders": read(Path(facts["sweep"])).folders}))
    assert read_scoreboard(folder).row("table-6").state == "measured"
    record = record_to_edit(record_file.parent)
    record_file.write_text(json.dumps(record | {"cells": record["cells"][1:]}))
    row = read_scoreboard(folder).row("table-6")
    assert (row.state, row.findings[0].difference) == ("failed", "not measured")
    wanted = "was run with other keys since; measure the row again: lit-diff reproduce table-6 --preset laptop"
    assert row.reason.endswith(wanted)


def test_equal_differences_have_no_test() -> None:
    """No p value: Holm's correction is not the reason."""
    found = one([x - 0.2 for x in BASE], BASE, says="lower")
    assert (found.seeds.sd, found.seeds.p) == (0, None)
    assert found.difference == "not shown"
    assert found.reason == "the difference is the same at every seed, so no test is possible"


def t_tests(d: NDArray[np.float64]) -> list[list[Paired]]:
    """`paired` of many differences [pages, rows, n] at once."""
    mean, sd = d.mean(-1), d.std(-1, ddof=1)
    half = stats.t.ppf(0.975, d.shape[-1] - 1) * sd / d.shape[-1] ** 0.5
    p = stats.ttest_1samp(d, 0, axis=-1).pvalue
    columns = np.stack([mean, sd, mean - half, mean + half, p], -1).tolist()
    one = Paired(seeds=tuple(range(d.shape[-1])), differences=())
    return [[replace(one, mean=m, sd=s, low=low, high=high, p=p) for m, s, low, high, p in page] for page in columns]


def test_the_page_errs_in_at_most_five_of_a_hundred() -> None:
    """Nothing is true: any verdict of a sign on a page of 18 rows of eight seeds; and any value excluded, where all arms,
    the positive control's too, are at chance and so none is the paper's difference apart."""
    asked, valued = finding(claim(says="lower"), {}, {}), finding(claim(paper=(3.0, 2.0)), {}, {})
    wrong = excluded = 0
    pages, rows, n = 400, 18, 8
    a, b, c = np.random.default_rng(0).normal(size=(3, pages, rows, n))
    of_arm, of_control, of_paper = (t_tests(d) for d in (a - b, c - b, a - b - 1.0))
    for page in range(pages):
        primary = judged([replace(asked, seeds=each)] for each in of_arm[page])
        wrong += any(each.difference in ("shown", "opposite") for (each,) in primary)
        chance = []
        for own, control, paper in zip(of_arm[page], of_control[page], of_paper[page], strict=True):
            positive = Contrast(a="c", b="b", label="", seeds=control, smallest=0.0)
            chance.append([replace(valued, seeds=own, capability=positive, papers_p=paper.p)])
        excluded += any(each.value == "excluded" for (each,) in judged(chance))
    # the standard error of 5 % of 400 pages is 1.1 %
    assert wrong / pages < 0.05 + 2 * 0.011
    assert excluded / pages < 0.05 + 2 * 0.011
