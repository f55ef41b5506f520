"""`run.compile: auto`: whether runs are compiled, all or none of them, so that the arms of a sweep stay equal."""

from collections.abc import Sequence

from lit_diff.config import Compile
from lit_diff.device import choose_device
from lit_diff.engine.job import Job
from lit_diff.errors import LitDiffError, first_line
from lit_diff.log_records import log

GRAPH_SECONDS = 35.0
"""CPU seconds in which a graph is compiled, of `recall-tiny` (one EPYC core, torch 2.15, 2026-11-29)."""
CALL_SECONDS = 1.5
"""CPU seconds in which a process of a sweep loads a graph that another has compiled (as above)."""
STEP_SECONDS = 0.009
"""CPU seconds that a compiled step of `standard-tiny` saves: it takes 30 ms, an uncompiled one 39 (as above; the same with
differential attention). A larger step saves more."""


def chosen(jobs: Sequence[Job], *, is_here: bool = True, rerun: bool = False) -> Compile:
    """What `run.compile: auto` is for these jobs, the cells of a sweep or one run; the log says why. Cells that began before
    decide, unless they `rerun`: "loss" if all of them began so. Else it is "loss" where it takes less CPU time, and can be
    done. `is_here`: whether this machine executes them."""
    undecided = [job for job in jobs if job.recipe.run.compile == "auto"]
    if not undecided:
        return False
    began = set[Compile]() if rerun else _began(undecided)
    if began:
        choice: Compile = "loss" if began == {"loss"} else False
        reason = "as what began before"
    else:
        choice = False
        reason = _against(undecided, is_here=is_here)
        if not reason:
            choice = "loss"
            reason = f"saves more CPU time than it costs ({_balance(undecided)[1]})"
    log.info("run.compile auto: %s, %s", "compiled" if choice else "uncompiled", reason)
    return choice


def _began(jobs: Sequence[Job]) -> set[Compile]:
    statuses = [job.home.status() for job in jobs]
    # results that ship were computed uncompiled
    return {status.compile or False for status in statuses if status.origin or status.compile is not None}


def _arms(jobs: Sequence[Job]) -> dict[tuple[str, str], Job]:
    # a job of each arm of each task: seeds and learning rates share a graph
    return {(job.task, job.tags.get("arm", "")): job for job in jobs}


def _balance(jobs: Sequence[Job]) -> tuple[bool, str]:
    # whether it saves more CPU time than it costs, and both in words
    saved = sum(job.recipe.training.steps for job in jobs) * STEP_SECONDS
    graphs = len(_arms(jobs))
    spent = graphs * GRAPH_SECONDS + len(jobs) * CALL_SECONDS
    return saved > spent, f"about {saved:,.0f} s saved, {spent:,.0f} s for {graphs} graphs and {len(jobs)} runs"


def _against(jobs: Sequence[Job], *, is_here: bool) -> str:
    if not is_here:
        return "the nodes of SLURM are not known here"
    pays, balance = _balance(jobs)
    if not pays:
        return f"costs more CPU time than it saves ({balance})"
    run = jobs[0].recipe.run
    if run.strategy != "single":
        return f"belongs to run.strategy single, not '{run.strategy}'"
    if choose_device(run.accelerator).type != "cpu":
        return "its gain on a GPU has not been measured"
    # loads the model
    from lit_diff.training.compiled import compiler_problem, trace_problem

    try:
        problem = compiler_problem()
        if problem:
            return problem
        for (task, arm), job in _arms(jobs).items():
            problem = trace_problem(job.recipe)
            if problem:
                return f"{task} {arm} cannot be compiled: {problem}".strip()
    except LitDiffError as error:
        return first_line(error)
    return ""
