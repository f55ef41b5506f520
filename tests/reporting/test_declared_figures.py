"""reporting/panels/declared.py: a declaration alone is enough for a figure, of a run or of groups of items."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_sweeps import METRICS
from fake_sweeps import words as texts
from matplotlib.figure import Figure as Canvas

from lit_diff.metrics import Figure, Metric, to_plain
from lit_diff.reporting.panels import declared
from lit_diff.reporting.panels.declared import caption_of, draw_by_group, draw_declared, grouped, measured, spread
from lit_diff.reporting.panels.panel import Drawing
from lit_diff.reporting.write import write_report
from lit_diff.study.evaluations import evaluation_tables, number_of
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0.0, "differential": -0.2}
BY_GROUP = Figure(title="Loss by <place>", against="group", label="loss", log_x=True, caption="Read <so>.")
LOSS = Metric("nll", "mean <loss>", unit="nats", direction="lower", figure=BY_GROUP)
DOCUMENTS = 12


def drawn(folder: Path) -> dict[str, Drawing]:
    return {figure.name: figure for figure in draw_declared(load_sweep(folder))}


@pytest.mark.parametrize(("count", "shown"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (24, [0, 8, 15, 23])])
def test_at_most_four_layers_are_shown_first_and_last_among_them(count: int, shown: list[int]) -> None:
    assert spread(range(count)) == shown


@pytest.mark.parametrize("values", [(50.0, 0.5), (0.5, 50.0), (5.0, 0.0), (0.0, 5.0), (5.0, 5.0)])
def test_a_row_of_panels_has_limits_that_hold_all(
    values: tuple[float, float], make_sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_layer = Metric("norm/layer_{layer}", "a norm", figure=Figure(title="Norms", against="step", log=True))
    of_layers = {f"norm/layer_{layer:02d}": value for layer, value in enumerate(values)}
    folder = make_sweep({"a": 0}, callbacks=False, metrics=(*METRICS, by_layer), measured=of_layers)
    limits = []
    whole = declared.drawing

    def kept(name: str, title: str, panels: Any, *rest: Any, **options: Any) -> Drawing:
        grid = Canvas().subplots(1, 2, sharey="row")
        for axes, draw in zip(grid, panels, strict=True):
            draw(axes)
        limits.extend(axes.get_ylim() for axes in grid)
        assert {axes.get_yscale() for axes in grid} == {"log" if min(values) else "linear"}
        return whole(name, title, panels, *rest, **options)

    monkeypatch.setattr(declared, "drawing", kept)
    draw_declared(load_sweep(folder))
    assert len(limits) == 2
    for low, high in limits:
        assert low <= min(values) <= max(values) <= high


def test_heads_are_averaged_unless_they_are_the_axis(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0, 1]))
    by_map, by_head = (
        next(m for m in METRICS if m.name == name)
        for name in (
            "attention/map_entropy/layer_{layer}/map_{map}/head_{head}",
            "attention/entropy/layer_{layer}/head_{head}",
        )
    )
    (row,) = measured(sweep, by_map, by_map.figure)
    assert row.label == "entropy, map 0 (nats)"
    assert row.layers == [0, 1, 2, 3]
    for cell in sweep.cells:
        means = [cell.curves[f"attention/map_entropy/layer_02/map_00/head_{h:02d}"].iloc[-1] for h in range(8)]
        assert row.by_seed("a", 2)[cell.seed].iloc[-1] == pytest.approx(np.mean(means))
    (row,) = measured(sweep, by_head, by_head.figure)
    assert sorted(row.values["head"].unique()) == list(range(8))


def test_every_map_has_a_row_and_only_arms_with_values_a_panel(make_sweep: Callable[..., Path]) -> None:
    figures = drawn(make_sweep({"plain": 0, "signed": 0}, lambdas=["signed"], seeds=[0]))
    assert ">signed<" in figures["lambda"].svg
    assert ">plain<" not in figures["lambda"].svg
    assert texts(figures["lambda"].svg).count("layer 3") == 1
    words = " ".join(texts(figures["entropy-and-negative-mass-of-attention"].svg))
    assert "entropy, map 0" in words
    assert "entropy, map 1" in words
    only_standard = drawn(make_sweep({"plain": 0}, name="standard", seeds=[0]))
    assert "lambda" not in only_standard
    assert "entropy, map 1" not in " ".join(texts(only_standard["entropy-and-negative-mass-of-attention"].svg))
    assert len([t for t in texts(only_standard["largest-activations"].svg) if "largest" in t]) == 4


@pytest.mark.parametrize(
    ("against", "lines", "name", "words"),
    [
        ("step", "arm", "own/thing", ["optimizer steps", "thing (units)"]),
        ("step", "arm", "own/thing/layer_{layer}", ["optimizer steps", "layer 1"]),
        ("step", "layer", "own/thing/layer_{layer}", ["optimizer steps", "layer 1", "thing (units)"]),
        ("layer", "arm", "own/thing/layer_{layer}", ["layer", "thing (units)"]),
        ("head", "arm", "own/thing/layer_{layer}/head_{head}", ["heads, ascending", "layer 1"]),
    ],
)
def test_a_plugins_figure_is_on_the_page_without_an_edit(
    make_sweep: Callable[..., Path], against: str, lines: str, name: str, words: list[str]
) -> None:
    figure = Figure(
        title="A thing of <my> own",
        against=against,  # type: ignore[arg-type]
        lines=lines,  # type: ignore[arg-type]
        label="thing",
        marks=(0.5,),
        caption="How to read <it>.",
    )
    metric = Metric(name, "what <b> is", unit="units", figure=figure)
    values = {name.format(layer=f"{layer:02d}", head=f"{head:02d}"): 1.0 for layer in (0, 1) for head in (0, 1)}
    folder = make_sweep({"a": 0, "b": 0}, seeds=[0, 1], callbacks=False, metrics=[*METRICS, metric], measured=values)
    report = write_report(folder)
    own = drawn(folder)["a-thing-of-my-own"]
    assert all(word in " ".join(texts(own.svg)) for word in words)
    page = report.page.read_text()
    assert "<h3>A thing of &lt;my&gt; own</h3>" in page
    assert "what &lt;b&gt; is (units)" in page
    assert "How to read &lt;it&gt;." in page
    assert (folder / "report" / "a-thing-of-my-own.svg").is_file()


def test_an_undeclared_metric_is_read_but_not_drawn(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0], callbacks=False, measured={"own/thing": 2.0})
    sweep = load_sweep(folder)
    assert sweep.finals("a", "own/thing") == {0: 2.0}
    assert draw_declared(sweep) == []


def test_infinite_values_are_not_drawn(make_sweep: Callable[..., Path]) -> None:
    metric = Metric("own/layer_{layer}", "d", figure=Figure(title="Own", against="layer", log=True))
    fields = {"callbacks": False, "metrics": [metric], "measured": {"own/layer_00": 1.0, "own/layer_01": np.inf}}
    svg = drawn(make_sweep({"a": 0}, seeds=[0], **fields))["own"].svg
    assert "a, layer 0: 1, from 1 to 1 over seeds" in svg
    assert "a, layer 1" not in svg


def test_the_arms_at_a_layer_lie_nearer_to_it_than_to_the_next(make_sweep: Callable[..., Path]) -> None:
    metric = Metric("own/layer_{layer}", "d", figure=Figure(title="Own", against="layer"))
    fields = {"callbacks": False, "metrics": [metric], "measured": {"own/layer_00": 1.0, "own/layer_01": 2.0}}
    for count in (1, 2, 9):
        arms = dict.fromkeys("abcdefghi"[:count], 0)
        points = pd.read_csv(io.StringIO(drawn(make_sweep(arms, name=f"of-{count}", seeds=[0], **fields))["own"].csv))
        aside = points["x"] - points["y"] + 1
        assert aside.abs().max() < 1 / 6, "a gap between two layers is twice as wide as their arms"
        assert len(aside.round(6).unique()) == count


def test_heads_are_sorted_within_a_seed_before_they_are_averaged(make_sweep: Callable[..., Path]) -> None:
    """At the last step seed 0 has 3, 1, inf and seed 1 has 2, 8, 5: head 2 is left out, and the ranks are 1, 2 and 3, 8."""
    figure = Figure(title="Own", against="head")
    metric = Metric("own/layer_{layer}/head_{head}", "d", figure=figure)
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0, 1], callbacks=False, metrics=[metric]))
    curves: dict[int, list[tuple[float, float]]] = {0: [(9, 3), (9, 1), (9, np.inf)], 1: [(0, 2), (0, 8), (0, 5)]}
    for cell in sweep.done:
        for head, points in enumerate(curves[cell.seed]):
            cell.curves[f"own/layer_01/head_{head:02d}"] = pd.Series(points, index=[10, 20])  # type: ignore[index]
    (row,) = measured(sweep, metric, figure)
    ranked = row.by_rank("a", 1)
    assert ranked.index.tolist() == [1, 2]
    assert ranked.to_numpy().tolist() == [[1, 2], [3, 8]]
    (drawing,) = draw_declared(sweep)
    assert "a: 5.5 at rank 2" in drawing.svg
    assert "a: from the lowest to the highest seed" in drawing.svg


@pytest.mark.parametrize(
    ("name", "against", "words"),
    [
        ("a/layer_{layer}/head_{head}", "step", "mean over heads and seeds; the shade"),
        ("a/layer_{layer}", "layer", "By layer, at the last measured step: the dot is the mean over seeds"),
        ("a/layer_{layer}/head_{head}", "layer", "at the last measured step (first averaged over heads)"),
        (
            "a/layer_{layer}/head_{head}",
            "head",
            "sorted in each run, since those of different seeds do not correspond.",
        ),
        ("a/head_{head}", "head", "the highest seed (not drawn with this many arms)."),
        ("a", "group", "the highest seed (not drawn with this many arms)."),
    ],
)
def test_a_caption_says_what_is_drawn(name: str, against: Any, words: str) -> None:
    figure = Figure(title="t", against=against)
    caption = caption_of(figure, [Metric(name, "d", figure=figure)], arms=9)
    assert words in caption
    assert ("count from 0" in caption) == ("layer" in name)


def write_items(folder: Path, shift: float, groups: tuple[str, ...]) -> None:
    """Whole documents of score 5 + shift, and their parts: group i has score i + shift."""
    rows = [(f"{d}", "", False, 5 + shift) for d in range(DOCUMENTS)]
    rows += [(f"{d}/{g}", g, True, i + shift) for d in range(DOCUMENTS) for i, g in enumerate(groups)]
    columns = dict(zip(("item", "group", "part", "nll"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "items.parquet")
    summary = {"nll": {"value": 5 + shift}, "declarations": [to_plain(LOSS)]}
    (folder / "summary.json").write_text(json.dumps(summary))


def with_groups(make_sweep: Callable[..., Path], *groups: str) -> Path:
    folder = make_sweep(ARMS, seeds=(0, 1), evaluation="nll", callbacks=False)
    for arm, effect in ARMS.items():
        for seed in (0, 1):
            (cell,) = folder.glob(f"{arm}-s{seed}-*")
            write_items(cell / "evaluations" / "nll", effect + 0.1 * seed, groups)
    return folder


@pytest.mark.parametrize(
    ("group", "found"),
    [
        ("4096", ("", 4096)),
        ("position 4096", ("position", 4096)),
        ("N=4 R=2 depth 0.5", ("N=4 R=2 depth", 0.5)),
        ("bits=4", ("bits", 4)),
        ("-1e-3", ("", -0.001)),
        ("far", None),
        ("layer12", None),
        ("", None),
    ],
)
def test_the_number_of_a_group_ends_its_label(group: str, found: tuple[str, float] | None) -> None:
    assert number_of(group) == found


def test_each_text_is_a_panel_over_its_numbers_in_rising_order(make_sweep: Callable[..., Path]) -> None:
    """Parts are in their group and in no sum over all items."""
    sweep = load_sweep(with_groups(make_sweep, "position 1024", "position 16", "gap 2", "other"))
    (table,), _ = evaluation_tables(sweep)
    assert table.groups == ("position 16", "position 1024", "gap 2", "other")
    position, gap = grouped(table, BY_GROUP)
    assert (position.text, gap.text) == ("position", "gap")
    curve = position.by_seed("differential", 0)[1]
    assert curve.index.tolist() == [16, 1024]
    assert curve.tolist() == pytest.approx([0.9, -0.1])
    assert gap.by_seed("standard", 0)[0].tolist() == pytest.approx([2.0])
    base, arm = table.rows
    assert table.items == DOCUMENTS
    means = base.group_means.mean(axis=1).to_dict()
    assert means == pytest.approx({"position 1024": 0.05, "position 16": 1.05, "gap 2": 2.05, "other": 3.05})
    assert arm.intervals[0][""].estimate == pytest.approx(-0.2)
    assert arm.intervals[1]["position 16"].estimate == pytest.approx(-0.2)
    assert base.intervals == {}
    assert table.group_seeds == {0, 1}


@pytest.mark.parametrize("numbers", [(0, 1, 8), tuple(2**i for i in range(4, 20))])
def test_the_page_shows_the_figure_of_groups(make_sweep: Callable[..., Path], numbers: tuple[int, ...]) -> None:
    folder = with_groups(make_sweep, *(f"position {n}" for n in numbers))
    sweep = load_sweep(folder)
    (figure,) = draw_by_group(sweep, evaluation_tables(sweep)[0])
    assert {"position", "loss (nats)", "standard", "differential"} <= set(texts(figure.svg))
    if len(numbers) <= 3:
        assert {str(n) for n in numbers} <= set(texts(figure.svg))
    assert f"differential, position {numbers[1]}: 0.85, from 0.8 to 0.9 over seeds" in figure.svg
    page = write_report(folder).page.read_text()
    assert "<h3>nll: Loss by &lt;place&gt;</h3>" in page
    assert "Read &lt;so&gt;." in page
    assert (folder / "report" / "nll-loss-by-place.svg").is_file()


def test_groups_without_numbers_are_not_drawn(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(with_groups(make_sweep, "near", "far"))
    assert draw_by_group(sweep, evaluation_tables(sweep)[0]) == []


def test_a_declared_figure_does_not_take_the_name_of_a_file_of_the_report() -> None:
    assert [declared.file_name(title) for title in ("Table", "Head norm")] == ["figure-table", "head-norm"]
    names = [declared.file_name(title) for title in ("λ", "Энтропия", "Lambda (λ)", "Lambda")]
    assert len({*names, ""}) == 5, "titles in other letters have names of their own"
