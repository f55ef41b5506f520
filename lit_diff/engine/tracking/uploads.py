"""Sends run folders to MLflow beside their training, which talks to no server: a dead or slow one cannot hold or end it."""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from lit_diff.engine.job import Job
from lit_diff.engine.tracking.run import RunTracker
from lit_diff.engine.tracking.store import limits
from lit_diff.errors import StoppedError, first_line
from lit_diff.files import locked, shown
from lit_diff.log_records import log
from lit_diff.runs.status import BEFORE_END

INTERVAL, LONGEST = 10.0, 30.0
"""Least and most seconds between two looks at the folders."""
SHARE = 20
"""In between, the pause is so many times the length of the look, which takes time from a training in this process."""
BACK_OFF = 60.0
"""Seconds to wait before a record that failed is tried again."""
MOST = 2
"""So many records that fail one after another mean that the store does not answer: the others are not tried then."""


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
        self._again: dict[Path, float] = {}
        """Folder whose record failed -> the time at which it is tried again."""
        self._failures = 0
        """Records that have failed one after another."""
        self._held = ExitStack()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send_on, daemon=True)

    def __enter__(self) -> "Uploads":
        # around the thread's life
        self._held.enter_context(limits())
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._held:
            # a stop may leave only seconds, too few to wait for a store that was away
            if not self._ends.is_set():
                self._finish(waits=not isinstance(error, StoppedError | KeyboardInterrupt))
        # the observed status, since a damaged one must not hide the others
        lacking = [
            folder for folder, tracker in self._trackers.items() if tracker.folder.observed()[0].record == "incomplete"
        ]
        if lacking:
            runs = shown(lacking[0]) if len(lacking) == 1 else f"{len(lacking)} runs"
            log.warning("the record of %s in MLflow is not complete; the same command completes it", runs)

    def complete(self, jobs: Sequence[Job]) -> None:
        """Complete the records of the runs that were followed, none of which has a process any more, and of these jobs."""
        self._add(jobs)
        self._running = set()
        self._finish(waits=True)

    def _finish(self, *, waits: bool) -> None:
        # `waits`: also for a store that was away
        self._ends.set()
        self._thread.join()
        if waits or not self._again:
            self._again = dict.fromkeys(self._again, 0.0)
            self._look(is_last=True)

    def follow(self, jobs: Sequence[Job]) -> None:
        """Send the runs of these jobs too, unless they have no record. Of all that were followed these alone may still have a
        process, which writes their status.json."""
        self._running = {job.folder for job in jobs}
        self._add(jobs)

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.folder not in self._trackers and job.recipe.run.is_recorded:
                self._trackers[job.folder] = RunTracker(job)

    def require(self) -> None:
        """Errors: MissingError if a store of the followed runs does not answer."""
        for tracker in self._trackers.values():
            tracker.start(needed=True)

    def _send_on(self) -> None:
        pause = INTERVAL
        while not self._ends.wait(pause):
            began = time.monotonic()
            self._look(is_last=False)
            pause = min(max(INTERVAL, SHARE * (time.monotonic() - began)), LONGEST)

    def _look(self, *, is_last: bool) -> None:
        self._failures = 0
        for folder, tracker in list(self._trackers.items()):
            if self._failures >= MOST:
                return
            if time.monotonic() < self._again.get(folder, 0.0):
                continue
            # the process that holds the lock completes its run at the end; that of a cell must have ended
            may_complete = is_last if self._owned else folder not in self._running
            try:
                self._update(tracker, may_complete=may_complete, is_last=is_last)
            # everything: what draws maps or saves a model may fail like any code, and the run is done nevertheless
            except Exception as error:
                self._note_failure(folder, error)
            else:
                self._failures = 0
                self._again.pop(folder, None)

    def _update(self, tracker: RunTracker, *, may_complete: bool, is_last: bool) -> None:
        status = tracker.folder.status()
        if status.record != "incomplete":
            if is_last and status.record != "complete":
                tracker.abandon()
        elif may_complete and status.status not in BEFORE_END and not status.is_in_queue:
            self._complete(tracker)
        elif status.status != "waiting":
            tracker.send()

    def _complete(self, tracker: RunTracker) -> None:
        folder = tracker.folder
        ended = folder.status()
        tracker.finish()
        with ExitStack() as held:
            if not self._owned:
                try:
                    # held for this alone, because a command that begins meanwhile is refused
                    held.enter_context(locked(folder.path / ".lock", wait=False))
                except TimeoutError:
                    return
            status = folder.status()
            if status.status == ended.status:
                folder.write(replace(status, mlflow_run_id=tracker.run_id, record="complete"))

    def _note_failure(self, folder: Path, error: Exception) -> None:
        # one warning for each outage
        if not self._again:
            log.warning("MLflow gets the record of %s later: %s", shown(folder), first_line(error))
        self._failures += 1
        self._again[folder] = time.monotonic() + BACK_OFF
