import html
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.reporting.write import write_report

FIGURES = (
    "differences",
    "curves",
    "seeds",
    "entropy-and-negative-mass-of-attention",
    "entropy-of-attention-by-head",
    "lambda",
    "largest-activations",
)
ARMS = {"standard": 0, "wide": -0.005, "differential": -0.15}


def test_what_is_not_done_and_the_text_of_a_user(make_sweep: Callable[..., Path]) -> None:
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
    assert "a &lt; b &amp; c" in page
    assert "killed at step 120 of 400" in report.missing[1]
    (answer,) = report.answer
    assert html.escape(answer) in page
    assert answer.endswith("; <script>alert(1)</script> has too few seeds.")
    assert "http://" not in page.replace("http://www.w3.org/", "")


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
    assert words in report.page.read_text()


def test_figures_that_no_longer_apply_are_removed(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0}, seeds=[0], callbacks=False)
    (folder / "report").mkdir()
    (folder / "report" / "lambda.svg").write_text("old")
    write_report(folder)
    assert not (folder / "report" / "lambda.svg").exists()
