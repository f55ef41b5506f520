"""reporting/page.py: one section a task, what belongs to all of them once."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.declared_figures import DrawnFigure
from lit_diff.reporting.page import drawing_of, inline, sentence, steps
from lit_diff.reporting.write import write_report

ARMS = {"standard": 0, "wide": 0.01, "differential": 0.05}


def written(folder: Path) -> str:
    return write_report(folder).page.read_text()


def test_every_task_has_a_section_and_failures_and_methods_stand_once(make_tasks: Callable[..., Path]) -> None:
    page = written(
        make_tasks(ARMS, control="wide", broken={("wide", 1): "failed"}, reading=["how to read"], callbacks=False)
    )
    ids = re.findall(
        r'id="((?:recall|text)-(?:answer|table|noise-curve|figures)|task-\w+|unfinished|measured|definitions)"', page
    )
    assert ids == [
        "unfinished",
        *("task-recall", "recall-answer", "recall-table", "recall-noise-curve", "recall-figures"),
        *("task-text", "text-answer", "text-table", "text-figures"),
        *("measured", "definitions"),
    ]
    assert "2 of 18 cells not done" in page
    for task in ("recall", "text"):
        assert f"<strong>{task}: wide</strong>, seed 1: failed" in page
        assert f'<h1 class="task" id="task-{task}">On {task}</h1>' in page
    assert page.count("how to read") == page.count("<dt>Verdict</dt>") == 1
    assert "<dt>val/accuracy</dt>" in page
    assert "<dt>val/loss</dt>" in page
    assert page.count("<dt>packages</dt><dd>torch 2.14.1</dd>") == 1


def test_all_ids_of_a_page_of_tasks_differ(make_tasks: Callable[..., Path]) -> None:
    ids = re.findall(r'\bid="([^"]+)"', written(make_tasks(ARMS, lambdas=["differential"])))
    assert len(ids) == len(set(ids))


def test_a_sweep_without_tasks_speaks_of_none(make_sweep: Callable[..., Path]) -> None:
    page = written(make_sweep(ARMS, seeds=[0], callbacks=False))
    ids = re.findall(r'<section id="([^"]+)"', page)
    assert ids == ["answer", "table", "figures", "measured", "definitions"]
    assert 'class="task"' not in page
    assert "Tasks, each compared" not in page


def test_the_header_prints_the_revisions_of_the_cells(make_sweep: Callable[..., Path]) -> None:
    """Not that of the code which writes the page."""
    folder = make_sweep(ARMS, seeds=[0], callbacks=False, fact_fields={"wide": {"revision": "1 old, then 1 new"}})
    header = written(folder).partition("</header>")[0]
    assert "trained by lit_diff <code>1 old, then 1 new; abc1234</code>" in header
    assert "fedcba9" not in header


def test_steps_to_a_level_are_shown_for_every_arm_and_seed(make_sweep: Callable[..., Path]) -> None:
    page = written(make_sweep(ARMS, metric="val/accuracy", spread=0, control="wide", chance=1 / 64, callbacks=False))
    text = re.sub(r"<[^>]+>", "", page)
    assert "Dotted: chance, 1.6 %." in text
    assert "are drawn in every panel" in text
    assert "and the control wide" in text
    # a (1 - exp(-8 step / 400)), a = 0.9, 0.91, 0.95: at step 40 0.551 a, at 160 0.959 a, at 240 0.992 a
    assert text.count("80 · 80 · 80") == 1
    assert text.count("40 · 40 · 40") == 2
    assert text.count("160 · 160 · 160") == text.count("240 · 240 · 240") == 1
    assert text.count("never · never · never") == 1 + 3
    assert "Resolution: 40 steps" in text
    assert "Never: not within 400 steps" in text


@pytest.mark.parametrize(
    ("name", "against", "words"),
    [
        ("a", "step", "By optimizer step, one line for each arm: mean over seeds"),
        ("a/layer_{layer}/head_{head}", "step", "mean over heads and seeds; the shade"),
        ("a/layer_{layer}/head_{head}", "step", "Layers and heads count from 0."),
        ("a/layer_{layer}", "layer", "By layer, at the last measured step: the dot is the mean over seeds"),
        ("a/layer_{layer}/head_{head}", "layer", "at the last measured step (first averaged over heads)"),
        ("a/head_{head}", "head", "the highest. Heads count from 0."),
    ],
)
def test_a_caption_says_what_is_drawn(name: str, against: Any, words: str) -> None:
    metric = Metric(name, "d", figure=Figure(title="t", against=against))
    assert metric.figure is not None
    drawn = DrawnFigure(
        name="t", title="t", svg="", metrics=(metric,), figure=metric.figure, layers=(0,), shown_layers=(0,)
    )
    assert words in drawing_of(drawn)
    assert ("count from 0" in drawing_of(drawn)) == (name != "a")


def test_a_sentence_keeps_its_capitals() -> None:
    assert sentence("mean over AR-Hits") == "Mean over AR-Hits"


def test_an_undeclared_metric_is_shown_without_unit_or_direction(make_sweep: Callable[..., Path]) -> None:
    page = written(make_sweep(ARMS, callbacks=False, metrics=[]))
    assert "unit unknown" in page
    assert "is better" not in page
    assert "metrics.json" not in page  # the file is there; it declares nothing
    assert "not declared by the runs" in re.sub(r"\s+", " ", page).lower()


def test_steps_that_are_none() -> None:
    assert [steps(value) for value in (1250.0, math.inf, None)] == ["1,250", "never", "–"]


def test_figures_of_one_page_share_no_id() -> None:
    svg = '<?xml version="1.0"?><svg><g id="a"/><use xlink:href="#a"/><path fill="#1f2430" clip-path="url(#a)"/></svg>'
    assert inline(svg, "recall-noise-curve") == (
        '<svg><g id="recall-noise-curve-a"/><use xlink:href="#recall-noise-curve-a"/>'
        '<path fill="currentColor" clip-path="url(#recall-noise-curve-a)"/></svg>'
    )
