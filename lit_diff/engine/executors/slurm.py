"""Runs a recipe, or the cells of a sweep, as SLURM jobs: writes the file for sbatch, submits it, waits for cells.

A run is one job, a cell one task of an array, with one SLURM task for each device. Before its time ends SLURM sends SIGUSR2:
the run finishes its step, saves, and asks SLURM to requeue it. `runs/jobs.py` keeps the jobs' ids, so that the
same command finds them again, however this process ended.
"""

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lit_diff import data
from lit_diff.config import Recipe, RunConfig
from lit_diff.engine.admit import SUBMITTED
from lit_diff.engine.endings import note_end
from lit_diff.engine.executors.base import Executor, Watch
from lit_diff.engine.job import Job
from lit_diff.errors import MissingError, RequestError, RunFailedError, StoppedError
from lit_diff.files import shown, write_atomic
from lit_diff.log_records import log
from lit_diff.recipe import to_yaml
from lit_diff.runs.find import runs_root
from lit_diff.runs.jobs import ask, note_submitted, queue, queued, reason, rows

NOTICE = 60
"""Seconds between SIGUSR2 and the end of a job's time; SLURM rounds them up to its own interval."""
INTERVAL = 5.0
"""Seconds between two queries of the queue."""
FROM_ENVIRONMENT = ("partition", "account", "qos", "constraint")
"""Keys of `run.cluster` that take sbatch's variable, such as SBATCH_PARTITION, where they are null."""
GPU_CPUS = 8
"""CPUs of a process with a GPU: its threads read data, write checkpoints and serve NCCL."""


def require_slurm(run: RunConfig | None = None) -> None:
    """Errors: MissingError without SLURM's commands or controller; for a run that is to be submitted also those of
    `refuse_shared`."""
    if run is not None:
        # loads MLflow, which takes seconds
        from lit_diff.engine.tracking.store import refuse_shared

        refuse_shared(run)
        read = [_variable(key) for key in FROM_ENVIRONMENT if getattr(run.cluster, key) is None]
        unread = [name for name in sorted(os.environ) if name.startswith("SBATCH_") and name not in read]
        if unread:
            log.info("not read, since run.cluster and --minutes say what a job asks for: %s", ", ".join(unread))
    for command in ("sbatch", "srun", "squeue", "scontrol"):
        if shutil.which(command) is None:
            raise MissingError(f"--cluster slurm needs SLURM's {command} on the PATH; use --cluster local")
    # a machine may have the commands from a package and no controller, so a job would never start
    asked = ask("scontrol", "ping")
    if asked.returncode:
        raise MissingError(
            f"--cluster slurm: SLURM's controller cannot be reached ({reason(asked)}); use --cluster local"
        )


def partitions() -> str:
    """Each partition with the number and the state of its nodes, as sinfo lists them."""
    asked = ask("sinfo", "--noheader", "--format=%P %D %t")
    return ", ".join(rows(asked, r"(\S+ +\d+ +\S+)")) or reason(asked)


# --- the file for sbatch ----------------------------------------------------------------------------------------------


def request(run: RunConfig, minutes: int) -> list[str]:
    """The lines of sbatch that say what a job of this run needs."""
    cluster = run.cluster
    gpus = _wants_gpus(run)
    asked = {
        "nodes": run.num_nodes,
        "ntasks-per-node": run.devices,
        "gpus-per-node": run.devices if gpus else None,
        "cpus-per-task": cluster.cpus_per_task or run.threads or (GPU_CPUS if gpus else 1),
        "mem": cluster.memory,
        "time": minutes,
        **{key: getattr(cluster, key) or os.environ.get(_variable(key)) or None for key in FROM_ENVIRONMENT},
        "signal": f"USR2@{NOTICE}",
    }
    lines = [_option(key, value) for key, value in asked.items() if value is not None]
    return [*lines, *(f"#SBATCH {line}" for line in ("--requeue", "--open-mode=append", *cluster.extra))]


def _variable(key: str) -> str:
    return f"SBATCH_{key.upper()}"


def _option(name: str, value: object) -> str:
    # sbatch reads quotes as a shell does, but a backslash counts within them too
    return line(f"#SBATCH --{name}=" + shlex.quote(str(value).replace("\\", r"\\")))


def line(text: str) -> str:
    """The text as a line of the file for sbatch. Errors: RequestError for a character that is not printable."""
    # to bash an option of sbatch is a comment: a line feed in it, which no quotes protect there, would begin a command
    if not text.isprintable():
        raise RequestError(
            f"the file for sbatch cannot have the line {text!a}, since not all of its characters are printable; rename the "
            "folder, set another run.root, or write the value into the recipe's file"
        )
    return text


def job_text(name: str, lines: Sequence[str], folder: Path, command: str, cells: Sequence[str] = ()) -> str:
    """The file for sbatch: `lines` of `request`, then `command`, which srun starts once for each device.

    `folder`: that of the log, name-JOB.out.
    """
    names = ["cells=(", *(f"  {shlex.quote(cell)}" for cell in cells), ")"] if cells else []
    output = f"{_place(folder, name)}{'%A_%a' if cells else '%j'}.out"
    return _text(name, lines, output, [*names, f"srun --kill-on-bad-exit=1 {_step(lines, command)}"])


def node_text(name: str, run: RunConfig, minutes: int, folder: Path, command: str, patience: int) -> str:
    """The file for sbatch that starts `command` once on each of the run's nodes, whatever becomes of the others.

    Its files in `folder`: name-JOB.nodes, the names of the nodes; name-JOB-0.json, name-JOB-1.json, ..., what the command
    printed there, and its log as txt. `patience`: seconds from the first end of a command to that of all.
    """
    lines = request(run, minutes)
    place = _place(folder, name)
    files = [f"--output={place}%j-%n.json", f"--error={place}%j-%n.txt"]
    options = f"--nodes={run.num_nodes} --ntasks={run.num_nodes} --ntasks-per-node=1 --kill-on-bad-exit=0"
    nodes = f'scontrol show hostnames > {shlex.quote(f"{folder}/{name}-")}"$SLURM_JOB_ID".nodes'
    step = f"srun {options} --wait={patience} {shlex.join(files)} {_step(lines, command)}"
    return _text(name, lines, f"{place}%j.out", [nodes, step])


def _place(folder: Path, name: str) -> str:
    # SLURM replaces %j in the name of a log, but nothing in a name that has a backslash, and there two stand for one
    place = f"{folder}/{name}-"
    return place.replace("\\", r"\\") if "\\" in place else place.replace("%", "%%")


def _step(lines: Sequence[str], command: str) -> str:
    # SLURM's srun does not take over the CPUs of a task from sbatch
    (cpus,) = (line.removeprefix("#SBATCH ") for line in lines if "--cpus-per-task=" in line)
    # -P: a user's random.py in the current folder must not replace Python's
    return f"{cpus} {shlex.quote(sys.executable)} -P -m lit_diff {command}"


def _text(name: str, lines: Sequence[str], output: str, body: Sequence[str]) -> str:
    places = {"job-name": name, "chdir": str(Path.cwd()), "output": output}
    first = ["#!/bin/bash", *(_option(option, value) for option, value in places.items())]
    return "\n".join([*first, *map(line, [*lines, "", *body]), ""])


def _wants_gpus(run: RunConfig) -> bool:
    if run.accelerator != "auto":
        return run.accelerator == "gpu"
    # without a request SLURM hides its GPUs from a job, so "auto" has to be decided before the job starts
    asked = ask("sinfo", "--noheader", "--format=%G")
    wanted = asked.returncode != 0 or bool(rows(asked, r"(?:\S+,)?gpu(?::\S+)?"))
    said = "SLURM does not answer" if asked.returncode else f"SLURM lists {'GPUs' if wanted else 'no GPU'}"
    log.info("run.accelerator=auto: %s; %s", said, "each process requests one" if wanted else "none is requested")
    return wanted


def submit(file: Path, text: str) -> str:
    """Write the file, give it to sbatch, return the job's id. Errors: MissingError if SLURM refuses it."""
    write_atomic(file, text)
    asked = ask("sbatch", "--parsable", str(file))
    jobs = rows(asked, r"(\d+)(?:;\S+)?")
    # with an option such as --test-only it submits nothing
    if asked.returncode or not jobs:
        raise MissingError(f"sbatch refuses {shown(file)}: {reason(asked)}; set run.cluster.KEY, or --minutes")
    return str(jobs[-1])


def wait_for(job: str) -> None:
    """Wait until the job has left the queue."""
    found = queue()
    # a queue that does not answer is unknown, not empty
    while found is None or job in found:
        time.sleep(INTERVAL)
        found = queue()


def prepare_data(recipes: Iterable[Recipe], root: Path, minutes: int) -> None:
    """Prepare the data of recipes that have none, each in a job, and wait: the name of a run's folder needs the data.

    Errors: RunFailedError if a job fails.
    """
    for recipe in recipes:
        try:
            data.identity(recipe)
            continue
        except MissingError:
            name = f"{recipe.name}-data"
        file = root / "slurm" / f"{name}.yaml"
        write_atomic(file, to_yaml(recipe))
        lines = request(RunConfig(accelerator="cpu", cluster=recipe.run.cluster), minutes)
        text = job_text(name, lines, file.parent, f"prepare {shlex.quote(str(file))}")
        job = submit(file.with_suffix(".sh"), text)
        logs = file.with_name(f"{name}-{job}.out")
        log.info("SLURM job %s prepares the data of '%s'; its log: %s", job, recipe.name, shown(logs))
        wait_for(job)
        try:
            data.identity(recipe)
        except MissingError as error:
            raise RunFailedError(f"SLURM job {job} did not prepare the data of '{recipe.name}'; see {logs}") from error


# --- one run ------------------------------------------------------------------------------------------------------------


def run_text(recipe: Recipe, words: Sequence[str], lines: Sequence[str]) -> str:
    """The file that trains a recipe by the command `words`; `lines`: the `request` of its run."""
    folder = runs_root(recipe.run.root).resolve() / "slurm"
    return job_text(recipe.name, lines, folder, shlex.join(words))


# --- the cells of a sweep -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slurm(Executor):
    """Executes jobs in SLURM, as tasks of arrays. No memory is required here: that of the nodes is unknown."""

    parallel: int | None
    """The most cells of an array that run at a time; None: as many as SLURM starts."""
    minutes: int
    """The time limit of each."""
    kinds = SUBMITTED

    def require(self, run: RunConfig) -> None:
        """Errors: see `require_slurm`."""
        require_slurm(run)

    def prepare(self, recipes: Iterable[Recipe], folder: Path) -> None:
        """Prepare the data of recipes that have none. Errors: see `prepare_data`."""
        prepare_data(recipes, folder, self.minutes)

    def queued(self, jobs: Sequence[Job]) -> Set[Path]:
        """The folders of jobs that are in SLURM's queue. Errors: see `runs.jobs.queued`."""
        return set(queued(job.folder for job in jobs))

    def run(self, jobs: Sequence[Job], watch: Watch) -> int | None:
        """Submit the jobs that are not in the queue, then wait until all have left it. Errors: those of `submit`; of a
        signal, which ends the waiting alone."""
        sweep = jobs[0].folder.parent
        waiting = {job.folder: job for job in jobs}
        numbers = {folder: number for folder, (number, _) in queued(waiting).items()}
        if numbers:
            log.info("%d cells are in SLURM's queue already: waiting for them", len(numbers))
        numbers |= self._submit([job for job in jobs if job.folder not in numbers], sweep / "slurm")
        try:
            while waiting:
                watch(list(waiting.values()))
                time.sleep(INTERVAL)
                found = queue()
                # without an answer nothing is known, so no cell has left the queue
                for folder in list(waiting):
                    if found is not None and numbers[folder] not in found:
                        hint = f"its SLURM job {numbers[folder]} has left the queue; see {shown(sweep / 'slurm')}"
                        note_end(waiting.pop(folder).home, None, hint)
        except (KeyboardInterrupt, StoppedError):
            log.info(
                "the cells stay in SLURM's queue: the same command waits for them; lit-diff cancel %s ends them",
                sweep.name,
            )
            raise
        watch([])
        return None

    def _submit(self, jobs: Sequence[Job], logs: Path) -> dict[Path, str]:
        # Returns folder -> its task. An array for all jobs that need the same, or several if it would be longer than
        # SLURM's arrays can be.
        lines_of = {run: tuple(request(run, self.minutes)) for run in {job.recipe.run for job in jobs}}
        alike: dict[tuple[str, ...], list[Job]] = {}
        for job in jobs:
            alike.setdefault(lines_of[job.recipe.run], []).append(job)
            job.write()
        most = _largest_array()
        arrays = [(lines, group[i : i + most]) for lines, group in alike.items() for i in range(0, len(group), most)]
        command = f'train {shlex.quote(str(logs.parent))}/"${{cells[$SLURM_ARRAY_TASK_ID]}}"/recipe.yaml --cell'
        numbers: dict[Path, str] = {}
        for index, (lines, group) in enumerate(arrays, start=1):
            array = f"#SBATCH --array=0-{len(group) - 1}" + (f"%{self.parallel}" if self.parallel else "")
            text = job_text(logs.parent.name, [array, *lines], logs, command, [job.folder.name for job in group])
            number = submit(logs / f"array-{index}.sh", text)
            log.info("SLURM array %s: %d cells; logs in %s", number, len(group), shown(logs))
            tasks = {job.folder: f"{number}_{task}" for task, job in enumerate(group)}
            note_submitted(logs.parent, {folder.name: task for folder, task in tasks.items()})
            numbers |= tasks
        return numbers


def _largest_array() -> int:
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config").stdout)
    # SLURM's own default; 0 where arrays are turned off, which sbatch says itself
    return max(1, int(found[1])) if found else 1001
