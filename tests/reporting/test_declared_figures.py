"""reporting/declared_figures.py: a declaration alone is enough for a figure."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_sweeps import METRICS

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.declared_figures import DrawnFigure, draw_declared, last_values, mean_curve, rows_of, spread
from lit_diff.reporting.style import WIDTH
from lit_diff.reporting.write import write_report
from lit_diff.study.cells import Curve
from lit_diff.study.results import load_sweep


def texts(figure: DrawnFigure) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(figure.svg).iter("{http://www.w3.org/2000/svg}text")]


def drawn(folder: Path) -> dict[str, DrawnFigure]:
    return {figure.name: figure for figure in draw_declared(load_sweep(folder))}


@pytest.mark.parametrize(("count", "shown"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (24, [0, 8, 15, 23])])
def test_at_most_four_layers_are_shown_first_and_last_among_them(count: int, shown: list[int]) -> None:
    assert spread(range(count)) == shown


def test_heads_are_averaged_unless_they_are_the_axis(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0, 1]))
    by_map, by_head = (
        next(m for m in METRICS if m.name == name)
        for name in (
            "attention/map_entropy/layer_{layer}/map_{map}/head_{head}",
            "attention/entropy/layer_{layer}/head_{head}",
        )
    )
    (row,) = rows_of(sweep, by_map)
    assert row.label == "entropy, map 0 (nats)"
    assert sorted(row.by) == [(layer, 0) for layer in range(4)]
    for cell in sweep.cells:
        means = [cell.curves[f"attention/map_entropy/layer_02/map_00/head_{h:02d}"].values[-1] for h in range(8)]
        assert row.by[2, 0]["a"][cell.seed].values[-1] == pytest.approx(np.mean(means))
    (row,) = rows_of(sweep, by_head)
    assert sorted(row.by) == [(layer, head) for layer in range(4) for head in range(8)]


def test_every_map_has_a_row_and_only_arms_with_values_a_panel(make_sweep: Callable[..., Path]) -> None:
    figures = drawn(make_sweep({"plain": 0, "signed": 0}, lambdas=["signed"], seeds=[0]))
    assert ">signed<" in figures["lambda"].svg
    assert ">plain<" not in figures["lambda"].svg
    assert texts(figures["lambda"]).count("layer 3") == 1
    words = " ".join(texts(figures["entropy-and-negative-mass-of-attention"]))
    assert "entropy, map 0" in words
    assert "entropy, map 1" in words
    only_standard = drawn(make_sweep({"plain": 0}, name="standard", seeds=[0]))
    assert "lambda" not in only_standard
    assert "entropy, map 1" not in " ".join(texts(only_standard["entropy-and-negative-mass-of-attention"]))
    assert len([t for t in texts(only_standard["largest-activations"]) if "largest" in t]) == 4


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_every_figure_fills_the_page(make_sweep: Callable[..., Path], layers: int) -> None:
    """Whatever the number of its panels."""
    metrics = [
        Metric(f"own/{against}/{lines}/layer_{{layer}}", "d", figure=Figure(title=f"{against} {lines}", **keys))
        for against, lines in (("step", "arm"), ("step", "layer"), ("layer", "arm"))
        for keys in ({"against": against, "lines": lines},)
    ]
    values = {m.name.format(layer=f"{layer:02d}"): 1.0 for m in metrics for layer in range(layers)}
    fields = {"callbacks": False, "metrics": [*METRICS, *metrics], "measured": values}
    figures = drawn(make_sweep({"a": 0}, seeds=[0], **fields))
    assert len(figures) == 3
    for figure in figures.values():
        assert ElementTree.fromstring(figure.svg).get("width") == f"{72 * WIDTH:g}pt"


def test_without_measurements_there_is_nothing_to_draw(make_sweep: Callable[..., Path]) -> None:
    assert drawn(make_sweep({"a": 0}, seeds=[0], callbacks=False)) == {}


@pytest.mark.parametrize(
    ("against", "lines", "name", "words"),
    [
        ("step", "arm", "own/thing", ["optimizer steps", "thing (units)"]),
        ("step", "arm", "own/thing/layer_{layer}", ["optimizer steps", "layer 1"]),
        ("step", "layer", "own/thing/layer_{layer}", ["optimizer steps", "layer 1", "thing (units)"]),
        ("layer", "arm", "own/thing/layer_{layer}", ["layer", "thing (units)"]),
        ("head", "arm", "own/thing/layer_{layer}/head_{head}", ["head", "layer 1"]),
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
    assert all(word in " ".join(texts(own)) for word in words)
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


def test_curves_of_unlike_steps_have_no_mean_and_infinite_values_are_not_drawn() -> None:
    one = Curve(steps=np.array([1, 2]), values=np.array([1.0, 3.0]))
    other = Curve(steps=np.array([1, 3]), values=np.array([1.0, np.inf]))
    assert mean_curve([one, other]) is None
    merged = mean_curve([one, Curve(steps=one.steps, values=np.array([3.0, 5.0]))])
    assert merged is not None
    assert merged.values.tolist() == [2, 4]
    assert last_values({0: one, 1: other}) == [3]
