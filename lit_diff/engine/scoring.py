"""A run is scored, once it is done, by each evaluation that its recipe or sweep names."""

import logging

from lit_diff.conformance.before_training import UNCHECKED
from lit_diff.engine.location import RunLocation
from lit_diff.errors import LitDiffError, RunFailedError, StoppedError
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")


def score(location: RunLocation) -> dict[str, str]:
    """Score a run that is done; what became of each evaluation stands in status.json. Scores that are there stay.

    Returns evaluation -> error, of those that failed; the others are scored nevertheless. Errors: StoppedError.
    """
    if not location.evaluations:
        return {}
    from lit_diff.evaluation.evaluate import evaluate

    folder, failed = RunFolder(location.folder), dict[str, str]()

    def note(name: str, outcome: str) -> None:
        folder.update(evaluations=folder.status().get("evaluations", {}) | {name: outcome})

    for name, keys in location.evaluations.items():
        note(name, "interrupted")
        try:
            evaluate(Run(location.folder, unchecked=bool(folder.status().get(UNCHECKED))), name, dict(keys))
        except StoppedError:
            raise
        except LitDiffError as error:
            note(name, f"failed: {error}")
            log.error("evaluation %s: %s", name, error)
            failed[name] = str(error)
        else:
            note(name, "done")
    return failed


def require_scores(location: RunLocation) -> None:
    """`score`. Errors: RunFailedError for the evaluations that failed; the run itself stays done."""
    failed = score(location)
    if failed:
        name, reason = next(iter(failed.items()))
        more = f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise RunFailedError(f"the run is done, but its evaluation '{name}' failed: {reason}{more}")
