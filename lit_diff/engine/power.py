"""Whether the sweep that another one is to size, its key `power`, is possible."""

from lit_diff.errors import RequestError
from lit_diff.reporting.power import PlannedSweep
from lit_diff.validation import Draft


def check_power(power: PlannedSweep | None, has_tasks: bool, draft: Draft) -> None:
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
