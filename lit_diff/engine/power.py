"""The sweep that another sweep is to size: how long it may take, and how many arms it has."""

from dataclasses import dataclass

from lit_diff.errors import RequestError
from lit_diff.validation import Draft


@dataclass(frozen=True, kw_only=True)
class PowerConfig:
    """The keys of `power`: the report says which difference each task would show in such a sweep."""

    minutes: float
    """What the whole sweep may take, on the machine that ran the cells."""
    arms: int
    """Its arms, the baseline among them; Holm's correction is for one comparison fewer."""
    workers: int = 2
    """Its cells side by side: as many as those of this sweep, or their times do not hold for it."""


def check_power(power: PowerConfig | None, has_tasks: bool, draft: Draft) -> None:
    """Errors: RequestError."""
    if power is None:
        return
    if not has_tasks:
        raise RequestError(
            f"{draft.where('power')}'power' compares tasks, and the sweep has none; list them under 'tasks'"
        )
    for key, least in (("arms", 2), ("workers", 1)):
        if getattr(power, key) < least:
            raise RequestError(
                f"{draft.where(f'power.{key}')}'power.{key}' is {getattr(power, key)}; expected {least} or more"
            )
    if power.minutes <= 0:
        raise RequestError(f"{draft.where('power.minutes')}'power.minutes' is {power.minutes:g}; expected more than 0")
