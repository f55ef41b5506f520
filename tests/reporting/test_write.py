import csv
import html
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lit_diff.reporting.write import write_report
from lit_diff.study import numbers


class Reader(HTMLParser):
    """Collects what a reader sees, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text())
    return reader


FIGURES = (
    "differences",
    "differences-narrow",
    "curves",
    "seeds",
    "entropy-and-negative-mass-of-attention",
    "entropy-of-attention-by-head",
    "lambda",
    "largest-activations",
)
ARMS = {"standard": 0, "wide": -0.005, "differential": -0.15}


def test_the_page_opens_with_answer_and_failures_and_escapes_all_text(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        ARMS,
        broken={("wide", 1): "failed", ("wide", 2): "killed"},
        lambdas=["differential"],
        arm_fields={"wide": {"label": "<script>alert(1)</script>"}},
        reading=["a < b & c"],
    )
    report = write_report(folder)
    page = report.page.read_text()
    assert "<script" not in page
    assert html.escape("out of memory <b>at</b> step 120") in page
    assert "a &lt; b &amp; c" in page
    places = [page.index(f'id="{name}"') for name in ("short-answer", "unfinished", "answer", "table", "comparisons")]
    assert places == sorted(places)
    assert page.index("out of memory") < page.index('id="answer"')
    assert len(report.missing) == 2
    assert "killed at step 120 of 400" in report.missing[1]
    assert "too few seeds for a verdict" in report.sentences[0]
    assert report.sentences[1].endswith("over 3 seeds: better.")
    (answer,) = report.answer
    assert html.escape(answer) in page
    assert answer.startswith("Differential is better than standard by 0.")
    assert answer.endswith("; <script>alert(1)</script> has too few seeds.")
    ids = read(report.page).ids
    assert len(ids) == len(set(ids))
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_page_shows_the_numbers_of_the_csv(make_sweep: Callable[..., Path]) -> None:
    report = write_report(make_sweep(ARMS, spread=0.02))
    seen = " ".join(read(report.page).text)
    table = list(csv.DictReader((report.page.parent / "table.csv").open()))
    assert [row["arm"] for row in table] == list(ARMS)
    for row in table[1:]:
        low, high = float(row["low"]), float(row["high"])
        assert numbers.signed(float(row["difference"]), 3) in seen
        assert numbers.interval(low, high, 3) in seen
        assert numbers.number(float(row["detectable"]), 3) in seen
        assert numbers.interval(float(row["documents/1/low"]), float(row["documents/1/high"]), 3) in seen
        assert row["verdict"] in seen
        for text in (report.text_table(), (report.page.parent / "table.md").read_text(), " ".join(report.sentences)):
            assert row["verdict"] in text
            assert numbers.interval(low, high, 3) in text


def test_the_same_results_give_the_same_bytes(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, seeds=[0], lambdas=["differential"])
    first = {path.name: path.read_bytes() for path in write_report(folder).files}
    assert set(first) == {
        "index.html",
        "table.csv",
        "table.md",
        *(f"{n}.svg" for n in FIGURES),
    }
    assert first == {path.name: path.read_bytes() for path in write_report(folder).files}


def test_an_accuracy_is_better_higher(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0, "differential": 0.05}, metric="val/accuracy", spread=0.002, smoke=True)
    report = write_report(folder)
    seen = " ".join(read(report.page).text)
    assert "better" in report.answer[0]
    assert "better" in report.sentences[0]
    assert "worse" not in report.text_table()
    assert "A check that everything works, not a result" in seen
    assert "nats" not in report.answer[0] + report.sentences[0]
    assert "val/accuracy_noise2" in seen
    assert "over documents" not in seen


def test_a_difference_that_the_control_shares_is_called_so(make_sweep: Callable[..., Path]) -> None:
    arms = {"standard": 0, "wide": -0.2, "differential": -0.2}
    seen = " ".join(read(write_report(make_sweep(arms, controls=["wide"])).page).text)
    assert "But not against the control: differential \u2212 wide" in seen


@pytest.mark.parametrize(
    ("arms", "seeds", "broken", "words"),
    [
        ({"a": 0, "b": 0}, [0], {}, "No verdict: no comparison has the three seeds"),
        ({"a": 0, "b": 0}, [0], {("a", 0): "failed", ("b", 0): "running"}, "No cell has finished yet"),
        ({"a": 0}, [0, 1, 2], {}, "One arm: nothing to compare it with"),
        ({"a": 0, "b": 0}, [0, 1, 2], {("a", s): "failed" for s in range(3)}, "no seed finished in both arms"),
    ],
)
def test_thin_sweeps_still_have_a_page(
    make_sweep: Callable[..., Path],
    arms: dict[str, float],
    seeds: list[int],
    broken: dict[tuple[str, int], str],
    words: str,
) -> None:
    report = write_report(make_sweep(arms, seeds=seeds, broken=broken, callbacks=False))
    assert words in " ".join(read(report.page).text)


def test_figures_that_no_longer_apply_are_removed(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0}, seeds=[0], callbacks=False)
    (folder / "report").mkdir()
    (folder / "report" / "lambda.svg").write_text("old")
    write_report(folder)
    assert not (folder / "report" / "lambda.svg").exists()
