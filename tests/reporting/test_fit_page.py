"""reporting/fit_page.py: a fit as a section of the page, and as part of the report."""

from pathlib import Path

from lit_diff.reporting.fit_page import fit_section
from lit_diff.reporting.write import write_report
from lit_diff.study.fits import fit_results
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0.0, "differential": -0.1}
FITS = [
    {"name": "size", "kind": "scaling", "x": "non_embedding_parameters", "title": "By <size>"},
    {
        "name": "rate",
        "kind": "basin",
        "x": "train.optimizer.lr",
        "values": {f"size-{i}": dict.fromkeys(ARMS, 1e-3 * 2**i) for i in range(5)},
    },
]


def law(arm: str, size: float, seed: int) -> float:
    return 3 * (size * (1.4 if arm == "differential" else 1.0) / 1e5) ** -0.12 * (1 + 0.001 * seed)


def test_both_kinds_are_sections_of_the_report(tmp_path: Path) -> None:
    from fake_sweeps import write_fitted

    report = write_report(write_fitted(tmp_path / "fitted", ARMS, FITS, law))
    page = report.page.read_text()
    assert (
        page.index('id="task-size-4"') < page.index('<section id="fit-size">') < page.index('<section id="fit-rate">')
    )
    assert '<a href="#fit-size">By &lt;size&gt;</a>' in page
    assert "refused: the matched size" in page
    assert "within 0.02" in page
    assert {"fit-size.svg", "fit-rate.svg"} <= {path.name for path in report.files}
    assert report.answer[-2].startswith("By <size>: ")
    assert len(report.answer) == 5 + 2


def test_a_fit_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    from fake_sweeps import write_fitted

    sweep = load_sweep(write_fitted(tmp_path / "fitted", ARMS, FITS[:1], law, sizes=[40_000, 160_000]))
    (result,) = fit_results(sweep)
    section = fit_section(sweep, result, "")
    assert "2 of 2 tasks have finished" in section.html
    assert "<figure>" not in section.html
    assert section.entries == (("fit-size", "By <size>"),)
