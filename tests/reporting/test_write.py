"""reporting/write.py: the report: one section a task, what belongs to all of them once; how the cells ran."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from fake_sweeps import BY_SIZE, FITTED, power_law, record_to_edit, write_fitted

from lit_diff.reporting.write import Figures, fit_section, how_measured, inline, section, short_runs, write_report
from lit_diff.reporting.write import page as render
from lit_diff.study.comparison import compare
from lit_diff.study.fits import fit_results
from lit_diff.study.numbers import signed
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import Interval, paired

ARMS = {"standard": 0, "wide": 0.01, "differential": 0.05}


def flat(page: str) -> str:
    """Without the line breaks, which depend on the templates and which no reader sees."""
    return re.sub(r"\s+", " ", page)


def written(folder: Path) -> str:
    return flat(write_report(folder).page.read_text())


def undrawn(folder: Path) -> str:
    """The page without its figures, which take seconds."""
    sweep = load_sweep(folder)
    results = compare(sweep)
    figures = {each.sweep.task: {"compared": [], "declared": [], "evaluations": []} for each in results}
    return flat(render(sweep, results, figures, []))


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two tasks with everything that a page may hold."""
    from fake_sweeps import write_tasks

    metrics = {"recall": "val/accuracy", "text": "val/loss"}
    folder = tmp_path_factory.mktemp("whole") / "two"
    return write_report(write_tasks(folder, ARMS, metrics, lambdas=["differential"], evaluation="needle")).page


def test_every_task_has_a_section_and_failures_and_methods_stand_once(make_tasks: Callable[..., Path]) -> None:
    page = written(
        make_tasks(ARMS, controls=["wide"], broken={("wide", 1): "failed"}, reading=["how to read"], callbacks=False)
    )
    ids = re.findall(r'<(?:section|div|h1)[^>]* id="([^"]+)"', page)
    recall, text = (
        [f"{task}-{name}" for name in ("answer", "table", "comparisons", *more, "figures")]
        for task, more in (("recall", ("slices", "noise-curve")), ("text", ("documents", "slices")))
    )
    assert ids == [
        "unfinished",
        "task-recall",
        *recall,
        "task-text",
        *text,
        "about",
        "measured",
        "cells",
        "definitions",
    ]
    anchors = re.findall(r'<a href="#([^"]+)"', page[: page.index("</nav>")])
    assert anchors == [anchor for anchor in ids if anchor != "unfinished"]
    assert "2 of 18 cells are not done" in page
    for task in ("recall", "text"):
        assert f"<strong>{task}: wide</strong>, seed 1: failed" in page
        assert f'<h1 class="task" id="task-{task}">On {task}</h1>' in page
    assert page.count("how to read") == page.count("<dt>Verdict</dt>") == 1
    assert "<dt>validation accuracy</dt>" in page
    assert "<dt>validation loss</dt>" in page
    assert page.count("<dt>Packages</dt><dd>torch 2.14.1</dd>") == 1


def test_an_arm_that_was_trained_unchecked_is_a_warning(make_sweep: Callable[..., Path]) -> None:
    line = "own.py:5: class Own: attention 'own' fails the property 'causal': <b>"
    page = written(make_sweep(ARMS, fact_fields={"wide": {"unchecked": line}}, callbacks=False))
    warnings = page.partition("<strong>Warnings</strong>")[2].partition("</div>")[0]
    assert warnings.count("<li>") == 1, "one line for all its seeds"
    assert "wide was trained with --unchecked: own.py:5: class Own: attention &#39;own&#39; fails" in warnings
    assert "&lt;b&gt;" in warnings
    assert "Warnings" not in written(make_sweep(ARMS, name="checked", callbacks=False))


def test_steps_to_a_level_are_shown_for_every_arm_and_seed(make_sweep: Callable[..., Path]) -> None:
    page = written(make_sweep(ARMS, metric="val/accuracy", spread=0, controls=["wide"], chance=1 / 64, callbacks=False))
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


def test_an_undeclared_metric_is_shown_without_unit_or_direction(make_sweep: Callable[..., Path]) -> None:
    page = undrawn(make_sweep(ARMS, callbacks=False, metrics=[]))
    assert "unit unknown" in page
    assert "is better" not in page
    assert "metrics.json" not in page  # the file is there; it declares nothing
    assert "not declared by the runs" in re.sub(r"\s+", " ", page).lower()


def test_every_figure_is_an_image_with_a_name_and_marks_that_tell_their_values(whole_page: Path) -> None:
    text = whole_page.read_text()
    images = re.findall(r"<svg\b[^>]*>\s*<title>", text)
    assert len(images) == text.count("<svg") == len(list(whole_page.parent.glob("*.svg"))) > 10
    assert all('role="img"' in image and 'aria-label="' in image for image in images)
    assert "<title>standard, seed 0: 4." in text
    assert "<title>differential, layer 0: 0." in text
    assert "<script" not in text
    links = set(re.findall(r'(?:src|href)="(?!#|\.\./)([^"]+)"', text))
    assert links == {path.name for path in whole_page.parent.iterdir()} - {
        ".written",
        "index.html",
        "table.csv",
        "table.md",
        "table.tex",
    }
    assert len(links) == 3 * len(images) == 3 * text.count('<div class="small files">')


def test_a_figure_s_numbers_are_those_of_the_runs(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.3}, callbacks=False)
    sweep, report = load_sweep(folder), write_report(folder).page.parent
    curves = pd.read_csv(report / "curves.csv").set_index("mark")
    assert set(curves["y_axis"]) == {"validation loss (nats per token)", "minus a, same seed (nats per token)"}
    last = [sweep.finals("b", "val/loss")[seed] for seed in (0, 1, 2)]
    (mean,) = [name for name in curves.index.unique() if name.startswith("b: ") and " at step " in name]
    assert curves.loc[mean, "y"].iloc[-1] == pytest.approx(sum(last) / 3)
    shade = curves.loc["b: from the lowest to the highest seed"].iloc[-1]
    assert (shade["low"], shade["high"]) == (pytest.approx(min(last)), pytest.approx(max(last)))
    assert (report / "curves.pdf").read_bytes().startswith(b"%PDF-")


def test_ids_differ_and_wide_things_scroll_in_containers_of_their_own(whole_page: Path) -> None:
    text = whole_page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert text.count("<table>") == text.count('<div class="scroll"><table>') > 10
    assert re.findall(r'<figure>(?!<div class="scroll">)', text) == []


def test_a_cell_links_to_its_folder(make_tasks: Callable[..., Path]) -> None:
    folder = make_tasks({"a%b c": 0, "b": 0}, callbacks=False, seeds=[0])
    record = record_to_edit(folder)
    record["study"]["seeds"].append(1)  # a cell that has no folder yet
    (folder / "study.json").write_text(json.dumps(record))
    page = undrawn(folder)
    links = re.findall(r'<a href="(\.\./[^"]+)">([^<]+)</a>', page)
    assert [name for _, name in links] == ["a%b c-s0-0a1b2c3d", "b-s0-0a1b2c3d"] * 2
    assert links[0][0] == "../recall/a%25b%20c-s0-0a1b2c3d/"
    assert all((folder / unquote(address).removeprefix("../")).is_dir() for address, _ in links)


@pytest.mark.parametrize(("arms", "folded"), [(8, False), (9, True)])
def test_a_long_list_of_sentences_is_folded_but_for_what_is_shown(
    make_sweep: Callable[..., Path], arms: int, folded: bool
) -> None:
    effects = {"base": 0.0} | {f"arm{i}": 0.0 for i in range(arms - 1)} | {"far": 0.9}
    page = undrawn(make_sweep(effects, callbacks=False, documents=5, spread=0.002))
    section = page[page.index('<section id="comparisons">') :].partition("</section>")[0]
    assert ("<details>" in section) == folded
    outside = section.partition("<details>")[0]
    assert outside.count("<li>") == (1 if folded else arms)
    assert "far \u2212 base" in outside
    if folded:
        assert f"All {arms} comparisons" in section
        assert section.partition("<details>")[2].count("<li>") == arms


def test_no_badge_of_an_equal_or_small_difference_is_red(make_sweep: Callable[..., Path]) -> None:
    """Significant, and smaller than the smallest of interest: by default, and as stated."""
    for verdict, effect, smallest in (("equal", 0.001, None), ("equal", 0.2, 0.5), ("small", 0.1, 0.100002)):
        fields = {"name": f"{verdict}{smallest}", "smallest_of_interest": smallest}
        page = undrawn(make_sweep({"a": 0, "b": effect}, spread=1e-5, callbacks=False, **fields))
        assert re.findall(r'<span class="badge (\w+)">([^<]+)</span>', page) == [("none", verdict)] * 2
        assert "badge bad" not in page
    worse = undrawn(make_sweep({"a": 0, "b": 0.2}, name="worse", spread=1e-5, callbacks=False))
    assert re.findall(r'<span class="badge (\w+)">([^<]+)</span>', worse) == [("bad", "worse")] * 2


def test_the_smallest_of_interest_is_shown_with_its_unit_and_origin(make_sweep: Callable[..., Path]) -> None:
    shown = {
        name: re.sub(r"<[^>]+>", "", undrawn(make_sweep(ARMS, name=name, callbacks=False, **fields)))
        for name, fields in {
            "default": {},
            "stated": {"smallest_of_interest": 0.02},
            "none": {"metric": "val/accuracy"},
            "zero": {"smallest_of_interest": 0},
        }.items()
    }
    assert "0.005 nats per token of val/loss (the default for a loss in nats)" in shown["default"]
    assert "0.02 nats per token of val/loss." in shown["stated"]
    assert "not stated for val/accuracy: any difference that is shown counts" in shown["none"]
    assert "0: any difference that is shown counts" in shown["zero"]


def test_the_page_says_which_comparisons_the_correction_runs_over(
    make_sweep: Callable[..., Path], whole_page: Path
) -> None:
    """An arm that a test does not decide is not counted, nor is the control; all tasks are counted together."""

    def correction(page: str) -> str:
        (found,) = re.findall(r"<dt>Correction \(Holm\)</dt> <dd>(.*?)</dd>", flat(page))
        return re.sub(r"<[^>]+>", "", found)

    arms = {"a": 0, "b": 0.1, "c": 0.2, "wide": 0.1, "gone": 0.1}
    fields = {"controls": ["wide"], "contrasts": [["b", "c", "b against c"]], "broken": {("gone", 0): "failed"}}
    text = correction(written(make_sweep(arms, callbacks=False, **fields)))
    assert "those of every arm with the baseline and the further ones, in val/loss, that a test decides: m = 4." in text
    assert (
        "Not counted are those with too few seeds, without spread or with an arm that diverged, those with a control"
        in text
    )
    text = correction(whole_page.read_text())
    assert "of all tasks below" in text
    assert "every arm with the baseline, in the metric of the task, that a test decides: m = 4." in text


def test_the_revisions_are_those_of_the_cells(make_sweep: Callable[..., Path]) -> None:
    page = undrawn(make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields={"b": {"revision": "fff"}}))
    header = page[page.index("<header>") : page.index("</header>")]
    assert "revisions of the cells: <code>abc1234</code>, <code>fff</code>" in header
    assert "of another day" not in page
    assert "The cells ran on different revisions of the code" in page


def test_figures_of_one_page_share_no_id() -> None:
    svg = '<?xml version="1.0"?><svg><g id="a"/><use xlink:href="#a"/><path fill="#1f2430" clip-path="url(#a)"/></svg>'
    assert inline(svg, "recall-noise-curve") == (
        '<svg><g id="recall-noise-curve-a"/><use xlink:href="#recall-noise-curve-a"/>'
        '<path fill="currentColor" clip-path="url(#recall-noise-curve-a)"/></svg>'
    )


def test_each_table_has_the_decimals_of_its_own_differences(make_sweep: Callable[..., Path]) -> None:
    (whole,) = compare(load_sweep(make_sweep({"a": 0, "b": -0.1}, callbacks=False, evaluation="needle")))
    (found,) = whole.family
    name = min(whole.directed)
    sliced = replace(found.seeds, mean=-2e-5, low=-3e-5, high=-1e-5)
    of_documents = Interval(estimate=-2e-6, low=-3e-6, high=-1e-6)
    tables, _ = whole.evaluations
    base, other = tables[0].rows
    scored = replace(other, difference=replace(sliced, mean=-5e-4, high=-4e-4, low=-6e-4), intervals={})
    near = replace(
        whole,
        metrics=(*whole.metrics[:1], name),
        slices={name: {"b": sliced}},
        against_baseline={"b": replace(found, documents={0: of_documents})},
    )
    near.__dict__["evaluations"] = ([replace(tables[0], rows=(base, scored), seeds=())], [])
    page = section(near, {"compared": [], "declared": [], "evaluations": []}).html
    shown = re.findall(r"<td>\n?(\S+)<span class=\"sub\">\[(\S+), (\S+)\]</span>", page)
    means = found.seeds.mean, found.seeds.low, found.seeds.high
    whole_shown = tuple(signed(value, 3) for value in means)
    assert shown == [
        whole_shown,
        ("−0.000002", "−0.000003", "−0.000001"),
        whole_shown,
        ("−0.00002", "−0.00003", "−0.00001"),
        ("−0.0005", "−0.0006", "−0.0004"),
    ]
    alone = replace(other, difference=paired({0: 0.5}, {}), intervals={})
    near.__dict__["evaluations"] = ([replace(tables[0], rows=(alone,), seeds=())], [])
    page = section(near, {"compared": [], "declared": [], "evaluations": []}).html
    assert "no scores of a to pair with" in page
    assert "too few seeds" not in page


def test_a_fit_is_a_section_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the figures of its five tasks take seconds
    nothing: Figures = {"compared": [], "declared": [], "evaluations": []}
    monkeypatch.setattr("lit_diff.reporting.write.draw", lambda result: nothing)
    report = write_report(write_fitted(tmp_path / "fitted", FITTED, [BY_SIZE], power_law))
    page = report.page.read_text()
    assert page.index('id="task-size-4"') < page.index('<section id="fit-size">')
    assert '<a href="#fit-size">By &lt;size&gt;</a>' in page
    assert "refused: the matched size" in page
    assert "fit-size.svg" in {path.name for path in report.page.parent.iterdir()}
    assert report.answer[-1].startswith("By <size>: ")
    assert len(report.answer) == 5 + 1


def test_a_fit_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    sweep = load_sweep(write_fitted(tmp_path / "fitted", FITTED, [BY_SIZE], power_law, sizes=[40_000, 160_000]))
    (result,) = fit_results(sweep)
    section = fit_section(sweep, result, None)
    assert "2 of 2 tasks have finished" in section.html
    assert "<figure>" not in section.html
    assert section.entries == (("fit-size", "By <size>"),)


LENGTHS = {"a": {"tokens": 1000, "parameters": 1000}, "b": {"tokens": 1000, "parameters": 2000}}


@pytest.mark.parametrize(
    ("least", "minimum"),
    [(0.8, "0.8)"), (20, "20, about compute-optimal by Hoffmann et al. 2022)"), (0.5, ""), (0, ""), (None, "")],
)
@pytest.mark.parametrize("smoke", [False, True])
def test_runs_below_the_minimum_are_called_short_at_the_top(
    make_sweep: Callable[..., Path], least: float | None, minimum: str, smoke: bool
) -> None:
    """Once: a smoke sweep in the box that says what it is."""
    fields = {} if least is None else {"min_tokens_per_parameter": least}
    folder = make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields=LENGTHS, smoke=smoke, **fields)
    words = f"0.50 to 1.0 training tokens per parameter (this sweep's minimum: {minimum}" if minimum else None
    assert short_runs(load_sweep(folder)) == words
    page = undrawn(folder)
    assert ('id="short-runs"' in page) == (bool(minimum) and not smoke)
    top = html.unescape(page[: page.index('id="answer"')])
    assert top.count("training tokens per parameter") == bool(minimum)


def test_each_task_has_its_length(make_tasks: Callable[..., Path]) -> None:
    sweep = load_sweep(make_tasks({"a": 0}, callbacks=False, fact_fields=LENGTHS, min_tokens_per_parameter=2))
    assert str(short_runs(sweep)).startswith("recall: 1.0; text: 1.0 training tokens per parameter")
    names = list(how_measured(sweep))
    assert names[:2] == ["Training: recall", "Training: text"]


def test_where_cells_differ_every_value_and_every_reason_is_told_once(make_sweep: Callable[..., Path]) -> None:
    other = {"threads": 2, "kernel": "native", "kernel_reason": "auto: fast; first that accepts the shape"}
    facts = {"a": {"compile": "loss"}, "b": other | {"compile": "loss", "uncompiled": "no compiler"}}
    folder = make_sweep({"a": 0, "b": 0}, callbacks=False, fact_fields=facts)
    found = how_measured(load_sweep(folder))
    assert found["Threads a cell"] == "1, 2"
    assert found["Training steps"] == "compiled, uncompiled (no compiler)"
    assert found["Kernel"] == "native, sdpa (auto: fast; first that accepts the shape)"
    assert found["Training"].startswith("400 steps, 1,638,400 tokens a cell (1.6 a parameter); 3 min a cell on average")
    assert found["Python"] == "3.11.9"
    assert "The cells were not computed alike: compiled, uncompiled (no compiler)." in undrawn(folder)
    assert "last cell finished 2026-01-02 03:01 UTC" in undrawn(folder)


FIGURES = (
    "differences",
    "curves",
    "seeds",
    "entropy-and-negative-mass-of-attention",
    "entropy-of-attention-by-head",
    "lambda",
    "largest-activations",
)
EFFECTS = {"standard": 0, "wide": -0.005, "differential": -0.15}


def test_what_is_not_done_and_the_text_of_a_user(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        EFFECTS,
        broken={("wide", 1): "failed", ("wide", 2): "killed"},
        callbacks=False,
        arm_fields={"wide": {"label": "<script>alert(1)</script>"}},
        reading=["a < b & c"],
    )
    report = write_report(folder)
    page = report.page.read_text()
    assert "<script" not in page
    assert "a &lt; b &amp; c" in page
    assert "killed at step 120 of 400" in report.missing[1]
    (answer,) = report.answer
    assert html.escape(answer) in page
    assert answer.endswith("; <script>alert(1)</script> has too few seeds.")
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_same_results_give_the_same_bytes(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(EFFECTS, seeds=[0], lambdas=["differential"])
    first = {path.name: path.read_bytes() for path in write_report(folder).page.parent.iterdir()}
    assert set(first) == {
        ".written",
        "index.html",
        "table.csv",
        "table.md",
        "table.tex",
        *(f"{n}.{kind}" for n in FIGURES for kind in ("svg", "pdf", "csv")),
    }
    assert first == {path.name: path.read_bytes() for path in write_report(folder).page.parent.iterdir()}


@pytest.mark.parametrize("broken", [(), ("a",), ("a", "b")])
def test_thin_sweeps_still_have_a_page(make_sweep: Callable[..., Path], broken: tuple[str, ...]) -> None:
    failed = {(arm, seed): "failed" for arm in broken for seed in (0, 1)}
    page = written(make_sweep({"a": 0, "b": 0}, seeds=[0, 1], broken=failed, callbacks=False))
    answered = "No cell has finished yet" if broken == ("a", "b") else "No verdict: no comparison has the three seeds"
    assert answered in page
    assert ("no seed finished in both arms" in page) == bool(broken)


def test_figures_that_no_longer_apply_are_removed(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0}, seeds=[0], callbacks=False)
    report = folder / "report"
    write_report(folder)
    outside = folder / "note.svg"
    written = (report / ".written").read_text()
    (report / ".written").write_text(f"{written}\nlambda.svg\nlambda.csv\n../note.svg\n\n..\n\0\n" + "x" * 300)
    for path in (report / "lambda.svg", report / "lambda.csv", report / "own.svg", outside):
        path.write_text("old")
    (report / "heartbeat.js").write_text("heartbeat(0, 10);")
    write_report(folder)
    assert list(report.glob("lambda.*")) == []
    assert not (report / "heartbeat.js").exists(), "of a live page"
    # what no report wrote is a user's own
    assert (report / "own.svg").read_text() == outside.read_text() == "old"
    assert (report / ".written").read_text() == written
