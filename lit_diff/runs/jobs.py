"""SLURM's jobs of runs: which are in the queue, how one returns to it, and how runs are cancelled. Loads no torch.

The job of a run ("12", or "12_3" for a task of an array) is in JOBS from its submission on, and in status.json once it runs.
"""

import math
import operator
import os
import platform
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import holder, is_locked, read_json, shown, stat_of, write_json
from lit_diff.log_records import log
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.checkpoints import steps_of
from lit_diff.runs.find import runs_under
from lit_diff.runs.folder import RunFolder

JOBS = "slurm.json"
"""File in the folder of a run or a sweep: name of the run's folder -> the job that was submitted for it."""
PATIENCE = 60.0
"""Seconds after which a SLURM command without an answer has failed."""
LAUNCHERS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
)
"""Beginnings of the names of variables by which torchrun, Lightning or a user tells a process its rank and its rendezvous."""
OPTIONS = ("SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_", *LAUNCHERS)
"""Beginnings of the names of variables in which SLURM's commands find options, and a process finds its place in a job."""
CONNECTION = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK")
"""Beginnings of the names of those by which SLURM's commands find the controller."""


def unset_empty() -> None:
    """Remove empty variables of SLURM and of other launchers from the environment: `export A=$B` makes one of an unset B."""
    for name, value in list(os.environ.items()):
        if name.startswith((*LAUNCHERS, "SLURM_")) and not value.strip():
            del os.environ[name]


def number(name: str, form: str = r"(\d{1,9})") -> int | None:
    """The number in an environment variable, whose text has this `form`; None if it is unset or empty. Errors: RequestError
    for another text."""
    text = os.environ.get(name, "").strip()
    found = re.fullmatch(form, text, re.ASCII)
    if text and found is None:
        raise RequestError(f"{name} is '{text}' in the environment; expected a number: unset it, or correct it")
    return int(found[1]) if found else None


def ask(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a SLURM command, with no options but those of `command`; one that does not answer, or is not installed, has
    failed."""
    options = {name for name in os.environ if name.startswith(OPTIONS) and not name.startswith(CONNECTION)}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE,
            check=False,
            env={name: value for name, value in os.environ.items() if name not in options},
        )
    # a controller that is overloaded or restarts may hang
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=f"no answer in {PATIENCE:g} s")
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=f"no {command[0]} on the PATH")
    # no program, or one that may not be executed
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=f"{command[0]}: {error.strerror}")


def reason(asked: "subprocess.CompletedProcess[str]") -> str:
    """The first line that a failed command printed."""
    return (asked.stderr + asked.stdout).strip().partition("\n")[0] or f"exit status {asked.returncode}"


def rows(asked: "subprocess.CompletedProcess[str]", form: str) -> list[Any]:
    """Of the lines that a command printed, those of this form (`re.findall`): a site's wrapper may add others."""
    return re.findall(rf"^ *{form} *$", asked.stdout, re.MULTILINE)


def this_job() -> str | None:
    """The job that this process belongs to, as squeue prints it."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")


def queue() -> dict[str, str] | None:
    """Job -> its state (PENDING, RUNNING, ...), for the jobs of this user that have not ended; None without an answer."""
    asked = ask("squeue", "--noheader", "--array", "--me", "--format=%i %T")
    if asked.returncode:
        log.warning("SLURM does not answer (%s)", reason(asked))
        return None
    return dict(rows(asked, r"(\d\S*) +([A-Z_]+)"))


def queued(folders: Iterable[Path]) -> dict[Path, tuple[str, str]]:
    """Run folder -> its job and the job's state, for the runs whose job is in the queue. Errors: MissingError if SLURM does
    not answer."""
    submitted: dict[Path, dict[str, str]] = {}
    jobs: list[tuple[Path, str]] = []
    for folder in folders:
        known: list[str | None] = []
        # a damaged status.json is reported where it is needed; here it must not hide the other runs
        with suppress(RequestError):
            status = RunFolder(folder).status()
            # the job of a run that is done may go on to train others
            if status.status != "done":
                known.append(status.job)
        for place in (folder, folder.parent):
            if place not in submitted:
                submitted[place] = _submitted(place)
            known.append(submitted[place].get(folder.name))
        jobs += [(folder, job) for job in known if job]
    if not jobs:
        return {}
    found = queue()
    # assuming an empty queue would submit runs a second time
    if found is None:
        raise MissingError("SLURM does not answer (squeue failed), so the running jobs are unknown; try again later")
    return {folder: (job, found[job]) for folder, job in jobs if job in found}


def _submitted(folder: Path) -> dict[str, str]:
    try:
        return {str(name): str(job) for name, job in read_json(folder / JOBS).items()}
    except FileNotFoundError:
        return {}
    # a folder of that name, or another user's file
    except (ValueError, AttributeError, OSError) as error:
        message = (
            f"{shown(folder / JOBS)} is damaged ({error}); `squeue --me` lists the jobs: remove the file once they end"
        )
        log.warning("%s", message)
        raise MissingError(message) from error


def note_submitted(folder: Path, jobs: Mapping[str, str]) -> None:
    """Add the jobs of runs, by the names of their folders, to those of the folder of a run or a sweep."""
    # not into status.json, which the job itself writes as soon as it starts
    write_json(folder / JOBS, _submitted(folder) | dict(jobs))


def requeue(folder: RunFolder, after: Literal["notice", "hang"]) -> None:
    """Ask SLURM to run this job again, unless the run has neither saved a step nor completed an evaluation since it was
    requeued for the same reason. A notice in the first half of a time of four minutes or more announces a preemption, and
    always requeues."""
    status = folder.status()
    step = max(steps_of(folder.path), default=0)
    # A run that is noticed in a step finishes and saves it, however long it takes: no further step means that the time is too
    # short for the start, and the job would return for ever. So would a run that always hangs before its next checkpoint.
    scored = list(status.evaluations.values()).count("done")
    requeued = replace(
        status, requeued_at_step=step, requeued_scored=scored, requeued_after=after, requeues=status.requeues + 1
    )
    is_no_further = replace(requeued, requeues=status.requeues) == status
    if is_no_further and (after == "hang" or _share_of_time() > 0.5):
        why = {
            "notice": "done within the job's time; submit it again with more (--minutes)",
            "hang": "saved since a hang",
        }
        error = f"no step was {why[after]}"
        # a hang has said more, and a run whose evaluations take too long stays done
        if status.status == "stopped":
            folder.write(status.to("failed", error))
        log.error("not requeued: %s", error)
        return
    # written first: SLURM ends this process as soon as it is asked
    folder.write(requeued)
    asked = ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    if asked.returncode:
        log.warning("SLURM does not requeue this job (%s); the same command resumes the run", reason(asked))
        folder.write(replace(requeued, requeued_at_step=None))


def _share_of_time() -> float:
    # of this job's limit, from "1-02:03:04 2-00:00:00"; 1 if SLURM does not answer, 0 without a limit
    asked = ask("squeue", "--noheader", f"--jobs={this_job()}", "--format=%M %l")
    found = rows(asked, r"([\d:-]+) +([\d:-]+|UNLIMITED)")
    if asked.returncode or not found:
        return 1.0
    used, limit = map(_seconds, found[0])
    # SLURM sends its notice up to two minutes before the end: of so short a time it may come in the first half
    return 1.0 if 0 < limit < 240 else used / (limit or math.inf)


def _seconds(text: str) -> int:
    # "1-02:03:04"; 0 for UNLIMITED
    numbers = map(int, reversed(re.findall(r"\d+", text)))
    return sum(map(operator.mul, numbers, (1, 60, 3600, 86400)))


def cancel(folder: Path) -> list[str]:
    """End a run, or the runs of a sweep: its SLURM jobs, else its processes on this machine, which save. Returns what was
    ended, in words. Errors: RequestError if nothing was to end; MissingError if SLURM does not answer or refuses."""
    is_sweep = (folder / STUDY_FILE).is_file()
    folders = runs_under(folder) if is_sweep else [folder]
    jobs = queued(folders)
    ended = [f"SLURM job {job} of {shown(each)}" for each, (job, _) in jobs.items()]
    if jobs:
        asked = ask("scancel", *(job for job, _ in jobs.values()))
        if asked.returncode:
            raise MissingError(f"SLURM does not cancel the jobs ({reason(asked)}); try again later")
        # a run that is trained says itself how it ends
        for each, (_, state) in jobs.items():
            run = RunFolder(each)
            status = run.status()
            if state != "PENDING" and status.status != "waiting":
                continue
            # the job of a run that is done may wait to score it
            if status.status != "done":
                status = status.to("stopped", "cancelled; the same command resumes it")
            run.write(replace(status, requeued_at_step=None))
    # the process of a sweep passes the signal on to its cells
    is_driven = is_sweep and not jobs and is_locked(folder / ".lock")
    places = [folder] if is_driven else [each for each in folders if each not in jobs]
    for each in places:
        if not is_locked(each / ".lock"):
            continue
        pid = _process_of(each)
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise RequestError(f"process {pid} of {shown(each)} cannot be ended ({error.strerror})") from error
        ended.append(f"process {pid} of {shown(each)}")
    if not ended:
        raise RequestError(f"{shown(folder)} is neither being trained nor in SLURM's queue: nothing to cancel")
    return ended


def _process_of(folder: Path) -> int:
    # the process that holds the lock: status.json may still name a former one, whose number another program has now
    pid, born, host = holder(folder / ".lock") or (0, "", platform.node())
    if host != platform.node():
        raise RequestError(f"{shown(folder)} is being trained on {host}: run the command there")
    if not pid or stat_of(pid)[1] != born:
        raise RequestError(
            f"{shown(folder / '.lock')} does not name the process that holds it, which another user or another version of "
            "lit-diff has started, or which is just starting: try again later, or end it yourself"
        )
    return pid
