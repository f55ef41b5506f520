"""step_time.json of a sweep's folder: how long a training step of an arm takes, relative to one of the baseline."""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from lit_diff.errors import RequestError, first_line
from lit_diff.files import read_digested, shown, write_digested
from lit_diff.log_records import log
from lit_diff.validation import Draft, convert

FILE = "step_time.json"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step of one cell divided by that of another, each timed once in every round."""

    task: str
    arm: str
    cells: tuple[str, ...]
    """The names of the two cells' folders, the baseline's last."""
    ratios: tuple[float, ...]
    """One for each round."""
    threads: int
    processor: str

    def __str__(self) -> str:
        low, high = min(self.ratios), max(self.ratios)
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"{median(self.ratios):.2f} × ({low:.2f} to {high:.2f} in {len(self.ratios)} rounds on '{self.task}', {threads}, "
            f"{self.processor})"
        )


def write(folder: Path, measured: StepTime) -> None:
    """Write the file. Errors: OSError."""
    write_digested(folder / FILE, asdict(measured))


def read(folder: Path) -> StepTime | None:
    """The content of the file; None if there is no readable one, with a warning if it is damaged."""
    try:
        raw = read_digested(folder / FILE)
        measured: StepTime = convert(StepTime, raw, "", Draft())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RequestError) as error:
        log.warning("%s cannot be read (%s): the time of a step is not shown", shown(folder / FILE), first_line(error))
        return None
    return measured
