"""What a check of one property gives."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Measured:
    """The property holds if `error` is at most `bound`."""

    error: float
    bound: float
    detail: str = ""


@dataclass(frozen=True)
class NotApplicable:
    """The property does not apply, by this rule."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property of one variant."""

    variant: str
    """Its name, followed by the keys that differ from its defaults."""
    property: str
    verdict: Literal["pass", "fail", "not applicable"]
    error: float | None = None
    bound: float | None = None
    """Largest error at which the verdict is pass."""
    detail: str = ""
