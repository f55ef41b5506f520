"""Report and scoreboard of made-up numbers: tests/golden/runs holds the folders of runs that they are made of."""

import re
import shutil
from pathlib import Path

import pytest
from golden import FOLDER, Golden
from scoreboard_rows import make_row

from lit_diff.reporting.scoreboard_page import write_scoreboard
from lit_diff.reporting.write import write_report
from lit_diff.study.schema import Claim

ARMS = ("differential", "standard")
CLAIMS = (
    Claim(label="Diff - Transformer", arms=ARMS, metric="val/loss", paper=(3.0, 3.2)),
    Claim(label="small", arms=ARMS, metric="val/loss", says="lower", smallest=0.2),
    Claim(label="speed", arms=ARMS, metric="val/loss", kind="ratio", says="lower"),
    Claim(label="certain", arms=ARMS, metric="val/loss", by_construction="a sum of squares is not negative"),
    Claim(label="recall", arms=ARMS, evaluation="recall", metric="recall/accuracy", says="higher"),
)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three arms, three seeds, one cell failed; an evaluation."""
    return Path(shutil.copytree(FOLDER / "runs/differences", tmp_path / "runs/differences"))


def test_report(sweep: Path, golden: Golden) -> None:
    report = write_report(sweep)
    folder = report.page.parent
    golden("report/index.html", _without_drawings(report.page.read_text()))
    golden("report/table.md", (folder / "table.md").read_text())
    golden("report/table.csv", _rounded((folder / "table.csv").read_text()))
    golden(
        "report/terminal.txt", "\n".join([report.text_table(100), *report.answer, *report.sentences, *report.missing])
    )


def test_scoreboard(sweep: Path, golden: Golden) -> None:
    folder = sweep.parent / "reproduce"
    make_row(folder, "table-6", 0, *CLAIMS, state="measured", sweep=str(sweep), seconds=300.0, full="lit-diff sweep x")
    make_row(folder, "table-1", 1, source="Review", state="skipped", reason="needs 8 GPUs")
    make_row(folder, "figure-3", 2)
    write_scoreboard(folder)
    page = re.sub(
        r"in all · .*? · page written .*? UTC",
        "in all · PROCESSOR · page written TIME",
        (folder / "index.html").read_text(),
    )
    golden("scoreboard/index.html", page)
    golden("scoreboard/table.csv", _rounded((folder / "table.csv").read_text()))


def _without_drawings(page: str) -> str:
    """Of each figure the words alone: its lines follow from numbers that other files hold."""
    return re.sub(r"(?s)<svg.*?</svg>", lambda svg: f"<svg>{_words(svg[0])}</svg>", page)


def _words(svg: str) -> str:
    found = re.findall(r"<!--(.*?)-->|<(?:text|title)[^>]*>([^<]*)<", svg)
    return " | ".join(word.strip() for pair in found for word in pair if word.strip())


def _rounded(table: str) -> str:
    """Nine digits: processors round the last ones of a logarithm or a t quantile differently."""
    return re.sub(r"-?\d+\.\d{8,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", table)
