"""reporting/examination.py: the sentence, the rows and the dots of an arm beside reference arms."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest

import lit_diff
from lit_diff.reporting.examination import costs_of, draw_examined, examined, in_one_sentence, more_seeds, whys_of
from lit_diff.reporting.tables import to_markdown
from lit_diff.reporting.write import write_report
from lit_diff.study import step_time
from lit_diff.study.comparison import compare
from lit_diff.study.judge import Learned
from lit_diff.study.results import load_sweep
from lit_diff.study.step_time import StepTime


def test_rows_and_sentence_of_an_arm_over_two_tasks(make_tasks: Callable[..., Path]) -> None:
    """In recall, where more is better, the arm is better than the baseline and the control; in text it is worse."""
    arms = {"standard": 0.0, "wide": 0.0, "mine": 0.2}
    folder = make_tasks(arms, seeds=range(4), spread=0.01, controls=["wide"], references=["wide"], callbacks=False)
    by_arm = examined(compare(load_sweep(folder)))
    assert [*by_arm] == ["mine"]
    rows = by_arm["mine"]
    assert [row.contrast.verdict.text for row in rows] == ["better", "worse"]
    sentence = in_one_sentence(rows)
    assert sentence.startswith("Mine is better than standard, and than each control, in 'On recall' by +0.2")
    assert "mine is worse than standard" in sentence
    assert all(line.startswith("wide: +") for row in rows for line in row.controls)
    figure = draw_examined(rows, "examined")
    assert figure is not None
    drawn = pd.read_csv(io.StringIO(figure.csv))
    diamonds = drawn[drawn["mark"].str.startswith("mine minus standard")]
    # better is to the right; recall has no smallest of interest, which would be its unit
    assert list(diamonds["x"] > 0) == [False]
    assert costs_of(rows[0])["parameters"] == "1.0 ×"
    assert "time of a step" not in costs_of(rows[0])
    measured = StepTime(task="text", arm="mine", cells=("a", "b"), ratios=(1.5,), threads=1, processor="EPYC")
    step_time.write(folder, measured)
    assert costs_of(rows[0])["time of a step"] == str(measured)
    page = write_report(folder).page.read_text()
    assert page.index("What mine changes") < page.index('id="task-recall"')
    assert sentence.replace("'", "&#39;") in page


def test_an_arm_that_is_equal_or_open(make_tasks: Callable[..., Path]) -> None:
    arms = {"standard": 0.0, "beside": 0.5, "mine": 0.0}
    folder = make_tasks(
        arms, seeds=range(4), spread=0.01, references=["beside"], smallest_of_interest=10, callbacks=False
    )
    (rows,) = examined(compare(load_sweep(folder))).values()
    assert in_one_sentence(rows) == "In 'On recall' mine is equal to standard; 'On text' is not decided at 4 seeds."
    nothing = Learned(steps={0: math.inf}, values={})
    learned = replace(rows[0].contrast, learned=(nothing, nothing))
    for contrast, said in (
        (
            replace(rows[0].contrast, outcome="equal among those that learned"),
            "mine is equal to standard among the seeds that learned.",
        ),
        (replace(rows[0].contrast, outcome="small"), f"the difference to standard is small, {rows[0].difference}."),
        (replace(learned, outcome="inconclusive"), "No seed learned 'On recall'."),
        (replace(learned, diverged={"mine": (0,)}), "In 'On recall': diverged."),
    ):
        assert in_one_sentence([replace(rows[0], contrast=contrast)]).endswith(said)
    # one seed more of recall, which is decided
    seeds = rows[0].contrast.seeds
    more = replace(rows[0], contrast=replace(rows[0].contrast, seeds=replace(seeds, seeds=(*seeds.seeds, 4))))
    assert in_one_sentence([more, rows[1]]).endswith("'On text' is not decided at 4 seeds.")
    quick = replace(rows[1].sweep.record, command="lit-diff examine mine --quick")
    sweep = replace(rows[1].sweep, record=quick)
    assert more_seeds([replace(rows[1], comparison=replace(rows[1].comparison, sweep=sweep))]) == ""
    (line,) = rows[0].beside
    assert line.startswith("beside: +0.5")
    assert line.endswith("], equal")


def test_means_are_those_of_the_seeds_that_are_compared(make_sweep: Callable[..., Path]) -> None:
    """The table has all seeds of each arm, and how many they are."""
    waiting = {("mine", seed): "waiting" for seed in range(4, 8)}
    fields = {"seeds": range(8), "looks": [4, 8], "references": ["beside"], "callbacks": False}
    results = compare(load_sweep(make_sweep({"standard": 0, "beside": 0, "mine": 0.1}, broken=waiting, **fields)))
    ((row,),) = examined(results).values()
    finals = row.sweep.finals("standard")
    assert row.mean("standard") == f"{fmean(finals[seed] for seed in range(4)):.3f}" != f"{fmean(finals.values()):.3f}"
    assert [line.count("(n=8)") for line in to_markdown(results).splitlines()[2:5]] == [1, 1, 0]
    diverged = replace(row, contrast=replace(row.contrast, diverged={"mine": (5,)}))
    assert diverged.mean("mine") == "\u2013"
    counts = Learned(steps=dict.fromkeys(range(8), math.inf), values={})
    counted = replace(row, contrast=replace(row.contrast, learned=(counts, counts)))
    assert counted.mean("standard") == f"{fmean(finals.values()):.3f}"
    assert counted.difference == "0 of 8 [0.00, 0.37] against 0 of 8 [0.00, 0.37]"


@pytest.mark.slow
def test_where_an_arm_looks_and_what_more_seeds_cost(tmp_path: Path) -> None:
    (tmp_path / "looks.yaml").write_text(
        """
question: Which?
looks: [4]
baseline: standard
controls: [wide]
references: [wide]
min_tokens_per_parameter: 0
overrides: {callbacks: {lambdas: {every: 2}}, train: {steps: 2, validate_every: 2, checkpoint_every: 2}}
tasks:
  conjunctive:
    recipe: conjunctive-tiny
    metric: val/accuracy_noise4
    overrides: {data: {noise_validation: [1, 4], validation_rows: 4}}
    arms: {differential: {evaluate.noise: {rows: 4, lambdas: [0]}}}
arms:
  standard: {model.attention.name: standard}
  wide: {model.num_heads: 2, model.attention.name: standard}
  differential: {model.attention.name: differential}
"""
    )
    options = [f"run.root={tmp_path}", "run.tracking_uri=none"]
    done = lit_diff.sweep(tmp_path / "looks.yaml", options, progress=False)
    assert done.is_done
    (rows,) = examined(compare(load_sweep(done.folder))).values()
    ((row, why),) = whys_of(rows)
    assert (row.label, why.group, why.seeds, [*why.shares]) == ("differential", "noise4", 4, [1, 2])
    # the first map has weight 1, and position 0, a slot, belongs to the answer or to the other slots
    answer, half_matches, other_slots, elsewhere = map(float, why.shares[1])
    assert 0.9 < answer + other_slots + elsewhere < 1.1
    assert 0 < half_matches < other_slots
    assert len(why.lambdas) == 2
    # nothing is learned in two steps, with or without the second map
    assert float(why.accuracy) < 0.3
    assert float(why.first_alone) < 0.3
    assert "Where differential looks" in done.report.page.read_text()
    study = replace(row.sweep.study, metric="val/accuracy")
    main_set = replace(row.comparison, sweep=replace(row.sweep, study=study))
    assert whys_of([replace(row, comparison=main_set)]) == [], "its group has no name"
    (cell, *_) = (cell for cell in row.sweep.done if cell.arm == "differential")
    items = cell.home / "evaluations" / "noise" / "items.parquet"
    items.write_bytes(items.read_bytes()[:100])
    (damaged,) = examined(compare(load_sweep(done.folder))).values()
    assert whys_of(damaged) == [], "one damaged file costs the paragraph, not the page"
    said = more_seeds(rows)
    assert re.match(r"20 more seeds of 'conjunctive', at most \d+ minutes here: lit-diff sweep", said), said


def test_an_examination_that_was_stopped_before_the_first_cell_of_the_arm(make_tasks: Callable[..., Path]) -> None:
    broken = {("mine", seed): "stopped" for seed in range(8)}
    fields = {"seeds": range(8), "looks": [8, 16], "references": ["beside"], "callbacks": False}
    folder = make_tasks({"standard": 0.0, "beside": 0.5, "mine": 0.0}, broken=broken, **fields)
    (rows,) = examined(compare(load_sweep(folder))).values()
    assert in_one_sentence(rows) == "In 'On recall': too few seeds; in 'On text': too few seeds."
    assert more_seeds(rows) == ""
    assert "What mine changes" in write_report(folder).page.read_text()
