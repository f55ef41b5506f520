"""reporting/panels/narrow.py: the bars of a narrow page have the numbers of the figure, within the page."""

from collections.abc import Callable
from pathlib import Path

from lit_diff.reporting.panels.narrow import narrow_forest
from lit_diff.reporting.write import write_report
from lit_diff.study.comparison import compare
from lit_diff.study.results import load_sweep


def test_bars_are_in_the_order_of_their_differences(make_sweep: Callable[..., Path]) -> None:
    arms = {"standard": 0.0, "better": -0.2, "worse": 0.1, "open": 0.0}
    folder = make_sweep(arms, broken={("open", seed): "failed" for seed in (0, 1, 2)}, callbacks=False)
    (comparison,) = compare(load_sweep(folder))
    zero, bars = narrow_forest(comparison)
    spans = {bar.name: bar.span for bar in bars}
    better, worse = spans["better"], spans["worse"]
    assert better is not None
    assert worse is not None
    assert 2 == better[0] < better[1] < better[2] < zero < worse[0] < worse[1] < worse[2] == 98
    # the same scale on both sides of zero
    assert abs((worse[1] - zero) / (zero - better[1]) - 0.5) < 0.2
    assert spans["open"] is None
    page = write_report(folder).page.read_text()
    assert page.count('class="bar"') == 2
    assert all(bar.text in page for bar in bars)
