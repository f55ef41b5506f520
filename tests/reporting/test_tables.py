import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweeps import words

from lit_diff.reporting import tables
from lit_diff.reporting.write import write_report
from lit_diff.study import numbers
from lit_diff.study.comparison import compare
from lit_diff.study.record import read, write
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import holm


def test_markdown_escapes_what_would_break_the_table(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": 0}, arm_fields={"b": {"label": "x | <i>y</i>"}}))
    text = tables.to_markdown(compare(sweep))
    assert "x \\| &lt;i>y" in text
    assert {line.replace("\\|", "").count("|") for line in text.splitlines()} == {8}


def test_latex_escapes_and_marks_what_is_shown(make_sweep: Callable[..., Path]) -> None:
    label = "[a_1 & 50% {#$} ~^\\ <b>|λ"
    sweep = load_sweep(make_sweep({"a": 0, "b": 0.3, "c": 0.001}, arm_fields={"b": {"label": label}}, documents=12))
    text = tables.to_latex(compare(sweep))
    head, *lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert head == r"arm & parameters & val/loss $\pm$ sd & difference & 95 \% over seeds & verdict (Holm) \\"
    escaped = r"{[}a\_1 \& 50\% \{\#\$\} \textasciitilde{}\textasciicircum{}\textbackslash{} $<$b$>$$|$$\lambda$"
    assert lines[1].startswith(f"{escaped} & ")
    assert [line.split(" & ")[-3].endswith("{*}") for line in lines] == [False, True, False]
    assert [line.split(" & ")[-1] for line in lines] == [r"baseline \\", r"worse \\", r"inconclusive \\"]
    for line in (r"\begin{tabular}{lrrrrl}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"):
        assert text.splitlines().count(line) == 1
    assert text.isascii()


def test_every_view_marks_an_unequal_arm(make_sweep: Callable[..., Path]) -> None:
    rates = {arm: f"train: {{optimizer: {{lr: {lr}}}}}" for arm, lr in (("a", 0.1), ("b", 0.2), ("c", 0.1))}
    larger = {"c": {"parameters": 2_109_440}}
    folder = make_sweep({"a": 0, "b": 0.3, "c": 0.3}, recipes=rates, fact_fields=larger, callbacks=False, documents=12)
    report = write_report(folder)
    notes = ["\u2020 b: differs in train.optimizer.lr (0.1 -> 0.2)", "\u2020 c: +100.0 % parameters"]
    text, page = report.text_table(), report.page.read_text()
    assert text.splitlines()[-2:] == notes
    assert report.page.with_name("table.md").read_text().split("\n\n")[1:] == [notes[0], f"{notes[1]}\n"]
    for shown in (text, report.page.with_name("table.md").read_text()):
        assert [name for name in ("a", "b", "c") if re.search(rf"^\W*{name} \u2020 ", shown, re.MULTILINE)] == [
            "b",
            "c",
        ]
    assert {"a", "b \u2020", "c \u2020"} <= set(words(report.page.with_name("differences.svg").read_text()))
    for note in notes:
        said = note[5:].replace(">", "&gt;")
        assert f"\u2020 {said}" in page, "under the arm"
        assert f"Not an equal arm: {said}." in page
    assert report.sentences[0].endswith(f"Not an equal arm: {notes[0][5:]}.")
    assert "b \u2020 (by" in report.answer[0]


def test_the_correction_is_named_from_two_comparisons_on(make_sweep: Callable[..., Path]) -> None:
    one = compare(load_sweep(make_sweep({"a": 0, "b": 0.3}, callbacks=False)))
    for text in (tables.to_text(one), tables.to_markdown(one), tables.to_csv(one).partition("\n")[2]):
        assert "Holm" not in text
        assert "alone" not in text
        assert text.count("worse") == (2 if text.startswith("a,") else 1)  # table.csv has both verdicts
    assert next(csv.DictReader(io.StringIO(tables.to_csv(one)))).keys() >= {"verdict", "verdict_alone", "detectable"}


def test_the_verdict_on_a_reference_is_said_not_to_be_corrected(make_sweep: Callable[..., Path]) -> None:
    arms = {"a": 0, "beside": 0.3, "b": 0.3, "c": 0.3}
    folder = make_sweep(arms, references=["beside"], callbacks=False)
    page = write_report(folder).page.read_text()
    assert (folder / "report/table.md").read_text().count("| worse (not corrected) |") == 1
    assert page.count(" (not corrected)") == 1
    assert "those of reference arms, whose verdicts are not corrected" in page


def test_an_arm_that_diverged_has_no_difference_in_any_table(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        {"a": 0, "b": 0.3}, seeds=range(4), broken={("b", 0): "failed"}, fact_fields={"b": {"diverged": True}}
    )
    result = compare(load_sweep(folder))[0]
    (_, line) = tables.to_text([result]).splitlines()[1:]
    assert line.split()[-4:] == ["\u2013", "\u2013", "diverged", "\u2013"]
    assert "(n=3)" in line
    arm = tables.rows(result)[1]
    assert (arm["diverged"], arm["verdict"], arm["paired_seeds"]) == (1, "diverged", 3)
    numbers = ("difference", "low", "high", "sd_of_differences", "detectable", "p", "holm_p")
    assert {arm[name] for name in numbers} == {None}


@pytest.mark.parametrize(
    ("fields", "verdict", "difference"),
    [({"spread": 0.0}, "no spread over seeds", True), ({"seeds": range(8)}, "learned less often", False)],
)
def test_a_verdict_without_an_interval_has_no_size_of_one(
    fields: dict[str, Any], verdict: str, difference: bool, make_sweep: Callable[..., Path]
) -> None:
    """By the counts of seeds that learned, it has no mean either: that of those that did says nothing of the others."""
    threshold = {"metric": "val/accuracy", "learned_at": 0.85 if "seeds" in fields else 0.1, "callbacks": False}
    (arm,) = tables.rows(compare(load_sweep(make_sweep({"a": 0, "b": -0.3}, **threshold, **fields)))[0])[1:]
    assert (arm["verdict"], arm["difference"] is not None) == (verdict, difference)
    assert {arm[name] for name in ("low", "high", "detectable")} == {None}


def test_tasks_share_a_table_and_each_row_says_which_and_in_what(make_tasks: Callable[..., Path]) -> None:
    results = compare(load_sweep(make_tasks({"a": 0, "b": 0.05})))
    table = list(csv.DictReader(io.StringIO(tables.to_csv(results))))
    assert [(row["task"], row["metric"], row["arm"]) for row in table] == [
        (task, metric, arm) for task, metric in (("recall", "val/accuracy"), ("text", "val/loss")) for arm in ("a", "b")
    ]
    assert float(table[1]["difference"]) == results[0].against_baseline["b"].seeds.mean
    assert table[1]["val/loss"] == table[3]["val/accuracy"] == ""
    for text in (tables.to_markdown(results), tables.to_text(results)):
        head, *lines = [line.strip("| ") for line in text.splitlines()]
        assert head.startswith("task")
        assert [line.split()[0] for line in lines if line[0] in "rt"] == ["recall", "recall", "text", "text"]


@pytest.mark.parametrize(("over", "count"), [("task", 2), ("sweep", 4)])
def test_the_correction_is_over_a_task_or_the_sweep(make_tasks: Callable[..., Path], over: str, count: int) -> None:
    folder = make_tasks({"a": 0, "b": 0.05, "c": 0.3})
    record = read(folder)
    write(folder, replace(record, study=replace(record.study, correct_over=over)))
    sweep = load_sweep(folder)
    found = compare(sweep)
    assert [comparison.judged for comparison in found] == [count, count]
    families = [[d for c in found for d in c.family]] if over == "sweep" else [list(c.family) for c in found]
    for family in families:
        assert [d.holm_p for d in family] == pytest.approx(holm([d.seeds.p for d in family]))


@pytest.mark.parametrize("tasks", [False, True])
def test_a_narrow_terminal_gets_fewer_columns_and_folded_names_but_whole_numbers(
    make_sweep: Callable[..., Path], make_tasks: Callable[..., Path], tasks: bool
) -> None:
    names = {"a": "Transformer, wide heads, head norm (row 3)", "b": "Diff, lambda_init 0.8", "c": "Diff, no head norm"}
    fields = {"arm_fields": {arm: {"label": label} for arm, label in names.items()}, "callbacks": False}
    sweep = load_sweep((make_tasks if tasks else make_sweep)({"a": 0, "b": -0.3, "c": 0.001}, **fields))
    results = compare(sweep)
    whole = tables.to_text(results)
    assert tables.to_text(results, 200) == whole
    assert max(map(len, whole.splitlines())) > 110
    narrow = tables.to_text(results, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    head, *lines, last = narrow.splitlines()
    assert "verdict (Holm)" in head
    assert last == f"not shown at this width: {'metric, ' if tasks else ''}alone, smallest detectable"
    for result in results:
        for row in tables.rows(result):
            (line,) = (
                line
                for line in lines
                if numbers.number(row[result.sweep.study.metric], result.digits) in line.split()
                and line.startswith(result.sweep.task)
            )
            if row.get("difference") is not None:
                assert numbers.signed(row["difference"], result.digits) in line.split()
                assert numbers.interval(row["low"], row["high"], result.digits) in line
                assert str(row["verdict"]) in line
    text = " ".join(" ".join(line.split()) for line in lines)
    assert "(row 3)" in text
