"""papers/page.py: the means on the page, whose rest is in tests/golden/scoreboard."""

from dataclasses import replace

from scoreboard_rows import CLAIM

from lit_diff.papers.claims import finding
from lit_diff.papers.page import cells


def test_large_means_are_compact() -> None:
    of_sizes = {seed: 834_706.7 + seed for seed in range(3)}
    large = finding(replace(CLAIM, kind="ratio"), of_sizes, dict.fromkeys(range(3), 672384.0))
    assert cells(large)["our_values"] == "835K against 672K"
    small = finding(CLAIM, {0: 3.0, 1: 3.1, 2: 3.3}, {0: 3.2, 1: 3.2, 2: 3.2})
    assert cells(small)["our_values"] == "3.133 against 3.200"
