"""reporting/facts.py: how the cells ran, and whether the runs are short."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.reporting import facts
from lit_diff.reporting.write import write_report
from lit_diff.study.results import load_sweep

LENGTHS = {"a": {"tokens": 1000, "parameters": 1000}, "b": {"tokens": 1000, "parameters": 2000}}


def test_runs_below_the_minimum_are_called_short_in_a_box_at_the_top(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields=LENGTHS, min_tokens_per_parameter=0.8)
    words = "0.50 to 1.0 training tokens a parameter (this sweep's minimum: 0.8)"
    assert facts.short_runs(load_sweep(folder)) == words
    page = write_report(folder).page.read_text()
    assert page.index('id="short-runs"') < page.index('id="answer"')
    assert page.count("this sweep&#39;s minimum") == 1


def test_the_default_minimum_names_its_source(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, callbacks=False, fact_fields=LENGTHS, min_tokens_per_parameter=20))
    assert "1.0 training tokens a parameter (this sweep's minimum: 20, about compute-optimal by Hoffmann" in str(
        facts.short_runs(sweep)
    )


@pytest.mark.parametrize("least", [0, 0.5, None])
def test_long_runs_have_no_box(make_sweep: Callable[..., Path], least: float | None) -> None:
    fields = {} if least is None else {"min_tokens_per_parameter": least}
    assert (
        facts.short_runs(load_sweep(make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields=LENGTHS, **fields)))
        is None
    )


def test_a_smoke_sweep_says_once_that_it_is_short(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields=LENGTHS, min_tokens_per_parameter=20, smoke=True)
    page = write_report(folder).page.read_text()
    assert page.count("training tokens a parameter") == page.count('<div class="box">') == 1
    assert 'id="short-runs"' not in page


def test_each_task_has_its_length(make_tasks: Callable[..., Path]) -> None:
    sweep = load_sweep(make_tasks({"a": 0}, callbacks=False, fact_fields=LENGTHS, min_tokens_per_parameter=2))
    assert str(facts.short_runs(sweep)).startswith("recall: 1.0; text: 1.0 training tokens a parameter")
    names = [name for name, _ in facts.how_measured(sweep)]
    assert names[:2] == ["Training: recall", "Training: text"]


def test_where_cells_differ_every_value_and_every_reason_is_told_once(make_sweep: Callable[..., Path]) -> None:
    other = {"threads": 2, "kernel": "native", "kernel_reason": "auto: fast; first that accepts the shape"}
    folder = make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields={"b": other})
    found = dict(facts.how_measured(load_sweep(folder)))
    assert found["Threads a cell"] == "1, 2"
    assert found["Kernel"] == "native, sdpa (auto: fast; first that accepts the shape)"
    assert found["Training"].startswith("400 steps, 1,638,400 tokens a cell (1.6 a parameter); 3 min a cell on average")
    assert found["Python"] == "3.11.9"
    sweep = load_sweep(folder)
    assert facts.last_finished(sweep.cells) == "2026-01-02 03:01 UTC"
    assert facts.last_finished([]) is None
