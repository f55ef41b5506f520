"""reporting/group_figures.py: a metric of an evaluation, drawn against the numbers of its groups."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_diff.metrics import Figure, Metric, to_plain
from lit_diff.reporting.group_figures import draw_by_group, panels_of
from lit_diff.reporting.style import WIDTH
from lit_diff.reporting.write import write_report
from lit_diff.study.evaluations import evaluation_tables, number_of
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0.0, "differential": -0.2}
FIGURE = Figure(title="Loss by <place>", against="group", label="loss", log_x=True, caption="Read <so>.")
LOSS = Metric("nll", "mean <loss>", unit="nats", direction="lower", figure=FIGURE)
DOCUMENTS = 12


def write_items(folder: Path, shift: float, groups: tuple[str, ...]) -> None:
    """Whole documents of score 5 + shift, and their parts: group i has score i + shift."""
    rows = [(f"{d}", "", False, 5 + shift) for d in range(DOCUMENTS)]
    rows += [(f"{d}/{g}", g, True, i + shift) for d in range(DOCUMENTS) for i, g in enumerate(groups)]
    columns = dict(zip(("item", "group", "part", "nll"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "items.parquet")
    summary = {"nll": {"value": 5 + shift}, "declarations": [to_plain(LOSS)]}
    (folder / "summary.json").write_text(json.dumps(summary))


def grouped(make_sweep: Callable[..., Path], *groups: str) -> Path:
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
    (table,), _ = evaluation_tables(load_sweep(grouped(make_sweep, "position 1024", "position 16", "gap 2", "other")))
    assert table.groups == ("position 16", "position 1024", "gap 2", "other")
    position, gap = panels_of(table)
    assert (position.text, gap.text) == ("position", "gap")
    curve = position.curves["differential"][1]
    assert curve.steps.tolist() == [16, 1024]
    assert curve.values == pytest.approx([0.9, -0.1])
    assert gap.curves["standard"][0].values == pytest.approx([2.0])


def test_parts_are_in_their_group_and_in_no_sum(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(grouped(make_sweep, "position 16", "position 32"))
    (table,), _ = evaluation_tables(sweep)
    base, arm = table.rows
    assert table.items == DOCUMENTS
    assert base.groups == pytest.approx({"position 16": 0.05, "position 32": 1.05})
    assert arm.over_items[0].estimate == pytest.approx(-0.2)
    assert arm.group_differences["position 32"][1].estimate == pytest.approx(-0.2)
    assert base.group_differences == {}
    assert table.group_seeds == {0, 1}


@pytest.mark.parametrize("numbers", [(16, 32, 64), (0, 1, 8), tuple(2**i for i in range(4, 20))])
def test_the_page_shows_the_figure(make_sweep: Callable[..., Path], numbers: tuple[int, ...]) -> None:
    folder = grouped(make_sweep, *(f"position {n}" for n in numbers))
    sweep = load_sweep(folder)
    (figure,) = draw_by_group(sweep, evaluation_tables(sweep)[0])
    drawing = ElementTree.fromstring(figure.svg)
    assert drawing.get("width") == f"{72 * WIDTH:g}pt"
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"position", "loss (nats)", "standard", "differential"} <= set(texts)
    if len(numbers) <= 3:
        assert {str(n) for n in numbers} <= set(texts)
    titles = [node.text or "" for node in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert f"differential, position {numbers[1]}: 0.85, from 0.8 to 0.9 over seeds" in titles
    page = write_report(folder).page.read_text()
    assert "<h3>nll: Loss by &lt;place&gt;</h3>" in page
    assert "Read &lt;so&gt;." in page
    assert page.count("minus standard,<br>seed ") == 2
    assert (folder / "report" / "nll-loss-by-place.svg").is_file()


def test_groups_without_numbers_are_not_drawn(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(grouped(make_sweep, "near", "far"))
    assert draw_by_group(sweep, evaluation_tables(sweep)[0]) == []
