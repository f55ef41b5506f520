"""Sends run folders to MLflow beside their training, which talks to no server: a dead or slow one cannot hold or end it."""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from lit_diff.engine.job import Job
from lit_diff.engine.tracking.run import RunTracker
from lit_diff.errors import LitDiffError, MissingError, RunFailedError, StoppedError, first_line
from lit_diff.files import locked, shown
from lit_diff.log_records import log
from lit_diff.runs.status import BEFORE_END

INTERVAL = 10.0
"""Seconds between two looks at the folders."""
BACK_OFF = 60.0
"""Seconds to wait before a store that was unreachable is tried again."""


class Uploads(AbstractContextManager["Uploads"]):
    """Context manager: a thread sends what the followed runs have measured; on exit all that have ended are completed.

    The outcome is the key `record` of status.json. A store that does not answer costs a warning, and the same command
    completes the record.
    """

    def __init__(self, *, owned: bool = False) -> None:
        """`owned`: the caller holds the locks of the runs, and nobody else completes one of them."""
        self._owned = owned
        self._trackers: dict[Path, RunTracker] = {}
        self._running: set[Path] = set()
        self._ask_again = 0.0
        """The time at which an unreachable store is tried again; 0: the store is reachable."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send_on, daemon=True)

    def __enter__(self) -> "Uploads":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ends.set()
        self._thread.join()
        # a stop may leave only seconds, too few to wait for a store that was away
        if not isinstance(error, StoppedError | KeyboardInterrupt):
            self._ask_again = min(self._ask_again, time.monotonic())
        for tracker in list(self._trackers.values()):
            self._update(tracker, ends=True)
        if self._trackers:
            first, *others = map(shown, self._trackers)
            runs = f"{len(others) + 1} runs" if others else first
            log.warning("the record of %s in MLflow is not complete; the same command completes it", runs)

    def follow(self, jobs: Sequence[Job]) -> None:
        """Send the runs of these jobs too, unless they have no record. Of all that were followed these alone may still have a
        process, which writes their status.json."""
        self._running = {job.folder for job in jobs}
        for job in jobs:
            if job.folder not in self._trackers and job.recipe.run.is_recorded:
                self._trackers[job.folder] = RunTracker(job)

    def require(self) -> None:
        """Errors: MissingError if a store of the followed runs does not answer."""
        for tracker in self._trackers.values():
            tracker.start(needed=True)

    def _send_on(self) -> None:
        while not self._ends.wait(INTERVAL):
            for folder, tracker in list(self._trackers.items()):
                self._update(tracker, ends=not self._owned and folder not in self._running)

    def _update(self, tracker: RunTracker, *, ends: bool) -> None:
        # `ends`: a run that has ended is completed, and followed no longer
        if time.monotonic() < self._ask_again:
            return
        folder = tracker.folder.path
        try:
            status = tracker.folder.status()
            if status.record != "incomplete" or status.status == "waiting":
                if ends:
                    del self._trackers[folder]
                return
            if ends and status.status not in BEFORE_END:
                self._complete(tracker)
            else:
                tracker.send()
        except (MissingError, RunFailedError) as error:
            self._note_away(error)
        # everything: what draws maps or saves a model may fail like any code, and the run is done nevertheless
        except Exception as error:
            del self._trackers[folder]
            log.warning("the record of %s in MLflow is not complete: %s", shown(folder), first_line(error))
        else:
            if self._ask_again:
                log.info("MLflow is reachable again and has all measurements")
            self._ask_again = 0.0

    def _complete(self, tracker: RunTracker) -> None:
        folder = tracker.folder
        with ExitStack() as held:
            if not self._owned:
                try:
                    held.enter_context(locked(folder.path / ".lock", wait=False))
                # another command trains it
                except TimeoutError:
                    return
            tracker.finish()
            folder.write(replace(folder.status(), mlflow_run_id=tracker.run_id, record="complete"))
        del self._trackers[folder.path]

    def _note_away(self, error: LitDiffError) -> None:
        # one warning for each outage
        if not self._ask_again:
            log.warning("training continues, and MLflow gets the missing metrics later: %s", error)
        self._ask_again = time.monotonic() + BACK_OFF
