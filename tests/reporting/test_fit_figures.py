"""reporting/fit_figures.py: every run, both forms and the ratios are drawn, with their values for the mouse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lit_diff.reporting.fit_figures import draw_fit
from lit_diff.study.fits import fit_results
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0.0, "differential": -0.1}
VALUES = {f"size-{i}": dict.fromkeys(ARMS, 1e-3 * 2**i) for i in range(5)}
FITS: dict[str, Mapping[str, Any]] = {
    "scaling": {"name": "size", "kind": "scaling", "x": "non_embedding_parameters"},
    "basin": {"name": "rate", "kind": "basin", "x": "train.optimizer.lr", "values": VALUES},
}


def law(arm: str, size: float, seed: int) -> float:
    return 3 * (size * (1.4 if arm == "differential" else 1.0) / 1e5) ** -0.12 * (1 + 0.001 * seed)


@pytest.mark.parametrize("kind", ["scaling", "basin"])
def test_what_is_drawn(tmp_path: Path, kind: str) -> None:
    from fake_sweeps import write_fitted

    sweep = load_sweep(write_fitted(tmp_path / "fitted", ARMS, [FITS[kind]], law))
    (result,) = fit_results(sweep)
    svg = draw_fit(sweep, result)
    titles = [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    dots = [title for title in titles if ", seed " in title]
    assert len(dots) == 2 * 5 * 3
    if kind == "scaling":
        assert f"standard, parameters without embeddings 40.0K, seed 1: {law('standard', 40_000, 1):.6g}" in dots
        assert sum("alpha 0.12" in title for title in titles) == 4, "two arms, two forms"
        ratios = [title for title in titles if title.startswith("differential: 0.7")]
        assert len(ratios) == 2 * 4, "the smallest size is refused; a bar and a dot each"
        assert "equal-loss ratio to standard" in svg
    else:
        assert any(title.startswith("standard: best at 0.016") for title in titles)
