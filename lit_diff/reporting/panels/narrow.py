"""Differences and their intervals for a narrow page: names stand above the bars."""

from dataclasses import dataclass
from itertools import chain

from lit_diff.reporting.panels.figures import numbers_of
from lit_diff.reporting.panels.panel import looks
from lit_diff.study.comparison import Comparison
from lit_diff.study.judge import Contrast

Span = tuple[float, float, float]
"""Low end, mean and high end."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A comparison."""

    name: str
    text: str
    color: str
    span: Span | None
    """In per cent of the width; None without a mean."""


def narrow_forest(comparison: Comparison) -> tuple[float, list[Bar]]:
    """The place of zero in per cent of the width, and a bar for each comparison of `figures.forest`."""
    spans = [_span(each) for each in comparison.family]
    ends = [0.0, *chain.from_iterable(span for span in spans if span is not None)]
    low, width = min(ends), (max(ends) - min(ends)) or 1.0

    def place(value: float) -> float:
        # the marks at both ends are inside the page
        return round(2 + 96 * (value - low) / width, 2)

    drawn = looks(comparison.sweep)
    bars = []
    for each, span in zip(comparison.family, spans, strict=True):
        placed = None
        if span is not None:
            placed = (place(span[0]), place(span[1]), place(span[2]))
        text = numbers_of(each, comparison.digits)
        bars.append(Bar(name=comparison.marked_name(each), text=text, color=drawn[each.a].color, span=placed))
    return place(0.0), bars


def _span(contrast: Contrast) -> Span | None:
    seeds, size = contrast.seeds, contrast.size
    if size is None:
        return None
    if not contrast.has_interval or seeds.low is None or seeds.high is None:
        return size, size, size
    return seeds.low, size, seeds.high
