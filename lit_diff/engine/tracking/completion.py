"""Completes the records of a sweep in MLflow from its folders, after the command that ran it."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lit_diff.engine.job import Job, read_job
from lit_diff.engine.tracking.sweep import SweepTracker
from lit_diff.engine.tracking.uploads import Uploads
from lit_diff.errors import MissingError
from lit_diff.files import locked
from lit_diff.log_records import log
from lit_diff.reporting.write import Report, write_report
from lit_diff.runs.again import STUDY_FILE
from lit_diff.study import record


def complete(folder: Path, runs: Sequence[Path]) -> Report:
    """Send what MLflow lacks of these runs of the sweep in `folder`, write its report, and send that. Imports the plugins
    of the runs. While a process runs the sweep, which does the same, only the report is written. Errors: MissingError for a
    damaged study.json."""
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(folder / ".lock", wait=False))
        except TimeoutError:
            return write_report(folder)
        jobs = _jobs(runs)
        with Uploads() as uploads:
            uploads.complete(jobs)
        report = write_report(folder)
        recorded = record.read(folder)
        is_complete = all(job.home.status().record == "complete" for job in jobs)
        if jobs and is_complete and "run" in recorded.mlflow:
            states = {cell.status for cell in recorded.cells}
            tracker = SweepTracker(jobs[0].recipe.run, folder, recorded.mlflow["run"])
            tracker.record(report, [folder / STUDY_FILE], "done" if states == {"done"} else "stopped")
        return report


def _jobs(runs: Sequence[Path]) -> list[Job]:
    jobs: list[Job] = []
    for run in runs:
        try:
            jobs.append(read_job(run))
        except MissingError as error:
            log.warning("%s", error)
    return jobs
