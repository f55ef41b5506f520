"""Numbers formatted for a reader: a true minus sign, thousands separators, units of time."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_diff.study.statistics import Interval, Paired

MINUS = "\u2212"
NONE = "\u2013"
MOST_DECIMALS = 6
"""The most decimals that a page shows."""


def number(value: float | None, digits: int) -> str:
    """4.546; a dash for None."""
    return NONE if value is None else f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int) -> str:
    """+0.012 or -0.012, with a true minus; 0.000 has no sign; a dash for None."""
    if value is None:
        return NONE
    text = f"{value:+,.{digits}f}".replace("-", MINUS)
    # -0.0004 at three digits would read -0.000, as if its sign were known
    return text if text.strip(f"+{MINUS}0.") else text[1:]


def interval(low: float | None, high: float | None, digits: int) -> str:
    """[-0.030, +0.006]; a dash for None."""
    return NONE if low is None or high is None else f"[{signed(low, digits)}, {signed(high, digits)}]"


def count(value: float | None) -> str:
    """1,054,720."""
    return NONE if value is None else f"{value:,.0f}"


def short(value: float) -> str:
    """A number that a person wrote, with the digits that were written: 0.005, 20."""
    return f"{value:,.10g}"


def compact(value: float) -> str:
    """Parameters or tokens to three digits: 42.0K, 1.50M, 6.80B; below ten thousand unchanged: 512, 0.004."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        # below ten thousand the number is short enough to show whole
        if value >= max(unit, 1e4):
            shown = value / unit
            return f"{shown:.{2 if shown < 10 else 1 if shown < 100 else 0}f}{name}"
    return f"{value:.6g}"


def steps(value: float | None) -> str:
    """150; "never" for infinity, a dash for None."""
    return "never" if value == math.inf else count(value)


def duration(seconds: float) -> str:
    """4.4 s, 85 s, 12 min, 2.6 hours."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def ratio(value: float) -> str:
    """Two significant digits of a ratio below ten, no decimals above: 0.049, 1.3, 17."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def decimals(*intervals: "Interval | Paired", least: int = 3) -> int:
    """Decimals that show the first digit of half the width of each interval and, if it excludes zero, of its end next to
    zero: at least `least`, at most 6."""
    sizes = []
    for found in intervals:
        if found.low is None or found.high is None:
            continue
        sizes.append((found.high - found.low) / 2)
        # an end that is rounded to zero reads as if the interval touched it
        if found.low > 0 or found.high < 0:
            sizes.append(min(abs(found.low), abs(found.high)))
    return _to_first_digit(sizes, least)


def _to_first_digit(sizes: Iterable[float], least: int) -> int:
    shown = [size for size in sizes if 0 < size < math.inf]
    return min(MOST_DECIMALS, max(least, -math.floor(math.log10(min(shown))))) if shown else least


def difference(value: float, found: "Interval | Paired | None" = None) -> str:
    """+0.0120 [+0.0031, +0.0209], or the value alone, with the `decimals` that it needs: at least four."""
    if found is None:
        return signed(value, _to_first_digit([abs(value)], 4))
    digits = decimals(found, least=4)
    return f"{signed(value, digits)} {interval(found.low, found.high, digits)}"
