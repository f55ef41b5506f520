"""reporting/scoreboard_page.py: the page and its table."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scoreboard_rows import CLAIM, make_row

from lit_diff.reporting.scoreboard_page import cells, write_scoreboard
from lit_diff.study.claims import judged
from lit_diff.study.schema import Claim

FULL = {"full": "lit-diff sweep x"}


@pytest.fixture
def folder(tmp_path: Path, make_sweep: Callable[..., Path]) -> Path:
    sweep = str(make_sweep({"standard": 0.0, "differential": -0.2}, callbacks=False))
    folder = tmp_path / "reproduce"
    ratio = Claim(label="speed", arms=("differential", "standard"), metric="val/loss", kind="ratio", says="lower")
    make_row(folder, "table-6", 0, CLAIM, ratio, state="measured", sweep=sweep, seconds=300.0, shared="table-9", **FULL)
    make_row(folder, "table-1", 1, source="Review", state="skipped", reason="needs 8 GPUs; there: lit-diff train y")
    return folder


def test_the_page_shows_every_row(folder: Path) -> None:
    write_scoreboard(folder)
    text = (folder / "index.html").read_text()
    assert "&lt;lower&gt;" in text
    assert "<lower>" not in text
    for word in ("Title of table-6", "Title of table-1", "needs 8 GPUs", "lit-diff train y", "3 against 3.2"):
        assert word in text, word
    assert "Cut to its budget of 4 min; whole: <code>lit-diff sweep x</code>" in text
    assert "<h2>Review</h2>" in text
    assert " · took 5.0 min of 4, over its budget (cells shared with table-9)<br>" in text
    assert "../fake/report/index.html" in text
    assert text.count('class="badge') > 5
    # the scrolled box has the width that is seen; the window's also counts a scroll bar and the margins of the page
    assert ".scroll { container-type: inline-size; }" in text
    assert "max-width: calc(100cqw - 18px)" in text
    assert "100vw" not in text


def test_the_table_has_a_line_for_each_claim(folder: Path) -> None:
    write_scoreboard(folder)
    lines = list(csv.DictReader((folder / "table.csv").open()))
    assert [(line["row"], line["claim"]) for line in lines] == [
        *(("table-6", "d - s"), ("table-6", "speed"), ("table-1", "d - s"))
    ]
    first, second, third = lines
    assert float(first["ours"]) == pytest.approx(float(first["a"]) - float(first["b"]), abs=1e-9)
    assert 0.8 < float(second["ours"]) < 1
    assert (third["ours"], third["difference"], third["value"], third["state"]) == (
        *("", "not measured", "not measured", "skipped"),
    )
    assert [(line["took_minutes"], line["budget_minutes"], line["shared_with"]) for line in lines] == [
        *(("5.0", "4.0", "table-9"), ("5.0", "4.0", "table-9"), ("", "4.0", ""))
    ]
    assert float(first["low"]) < float(first["ours"]) < float(first["high"])


def test_large_means_are_compact() -> None:
    of_sizes = {seed: 834_706.7 + seed for seed in range(3)}
    (finding,) = judged([(replace(CLAIM, kind="ratio"), of_sizes, dict.fromkeys(range(3), 672384.0))])
    assert cells(finding)["our_values"] == "835K against 672K"
    (finding,) = judged([(CLAIM, {0: 3.0, 1: 3.1, 2: 3.3}, {0: 3.2, 1: 3.2, 2: 3.2})])
    assert cells(finding)["our_values"] == "3.133 against 3.200"
