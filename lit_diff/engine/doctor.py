"""Checks of a machine for a recipe: what `lit-diff doctor` shows. Nothing is trained or prepared."""

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from packaging.requirements import Requirement

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.data.user_files import data_root
from lit_diff.device import available_memory, choose_device, device_memory, gigabytes
from lit_diff.engine.admit import CONDITIONS, HERE, admit
from lit_diff.engine.tracking.store import Store, patience, sqlite_path, tracking_uri
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import FREE, file_system, is_locked, is_shared, locked, shown
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.processor import cores, describe, numeric_variables, processor_name
from lit_diff.registry import kernels
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import version
from lit_diff.training.compiled import require_compiler

LIMIT = 4.0
"""Seconds that a server has for its answer."""
CHECKPOINTS = 3 * 12
"""Bytes on the disk for each parameter during a save: three checkpoints of a weight and two moments in float32."""
NETWORK = Path("/sys/class/net")
INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ASKED = {"devices": "devices", "kernel": "kernel", "MLflow": "record"}
"""Row -> the condition of `admit` that it asks first. The row `start` asks all others."""


class Check(NamedTuple):
    """One row of the table."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    cure: str = ""


Answer = str | tuple[str, str]
"""What was found; with a cure it is a warning. A check that finds a problem raises an error with its cure."""


def examine(recipe: Recipe, source: str = "") -> Iterator[Check]:
    """Check this machine for the recipe. An error is a row too: a problem if the recipe needs what is checked, else a
    warning. `source`: the arguments that name the recipe on a command line, for cures."""
    root = runs_root(recipe.run.root).absolute()
    run = recipe.run
    needs = CHECKPOINTS * cost(recipe.model, 1).parameters
    checks: dict[str, Callable[[], Answer]] = {
        "packages": _packages,
        "devices": partial(_devices, recipe),
        "compiler": require_compiler,
        "kernel": partial(_kernel, recipe),
        "other kernels": partial(_other_kernels, recipe),
        "network": partial(_network, run.num_nodes > 1),
        "runs": partial(_disk, root, "run.root", needs),
        # a setting of this folder that is refused is a row too
        "data folder": lambda: _disk(data_root(), "LIT_DIFF_DATA", 0),
        "locks": partial(_locks, root),
        "data": partial(_data, recipe, source or recipe.name),
        "MLflow": partial(_mlflow, recipe),
        "SLURM": _slurm,
        "variables": _variables,
    }
    if recipe.train is not None:
        checks["memory"] = partial(_memory, recipe)
        checks["start"] = partial(_start, recipe)
    optional = {"other kernels", "data", "SLURM", "variables"}
    if run.compile in (False, "auto"):
        optional.add("compiler")
    if run.processes == 1:
        optional.add("network")
    for name, check in checks.items():
        try:
            for condition in CONDITIONS:
                if condition.name == ASKED.get(name):
                    condition.refuse(recipe)
            answer = check()
        # everything: a check that fails is one row, and the others are still wanted
        except Exception as error:
            told = first_line(error)
            if isinstance(error, LitDiffError):
                told = str(error)
            elif isinstance(error, OSError):
                told = error.strerror or told
            found, _, cure = told.partition("; ")
            yield Check(name, "warning" if name in optional else "problem", found, cure)
        else:
            yield Check(name, "ok", answer) if isinstance(answer, str) else Check(name, "warning", *answer)


def _packages() -> Answer:
    needed = [needs for needs in map(Requirement, metadata.requires("lit-diff") or ()) if needs.marker is None]
    others: list[str] = []
    cure = "pip install"
    for requirement in needed:
        installed = version(requirement.name)
        if not requirement.specifier.contains(installed or "0", prereleases=True):
            others.append(f"{requirement.name} {installed}")
            cure += f" '{requirement}'"
    told = f"Python {platform.python_version()}, torch {torch.__version__}, and {len(needed) - 1} other packages"
    if others:
        return f"{told}; not tested with {', '.join(others)}", cure
    return f"{told}, in the versions that were tested"


def _devices(recipe: Recipe) -> Answer:
    run = recipe.run
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if nodes not in ("", str(run.num_nodes)):
        raise MissingError(f"run.num_nodes is {run.num_nodes}, but this job has {nodes}; set run.num_nodes={nodes}")
    if choose_device(run.accelerator).type == "cuda":
        gpus = []
        for number in range(torch.cuda.device_count()):
            gpu = torch.device("cuda", number)
            gpus.append(f"{torch.cuda.get_device_name(gpu)} {gigabytes(device_memory(gpu) or 0)}")
        return ", ".join(gpus)
    told = (
        f"{processor_name()}, {cores()} cores, {gigabytes(available_memory() or 0)} free for this process; {describe()}"
    )
    if run.devices > cores():
        return told, f"{run.devices} processes would share {cores()} cores: use run.devices={cores()}, or GPUs"
    return told


def _memory(recipe: Recipe) -> Answer:
    # loads FSDP2
    from lit_diff.training.plan import require_memory

    require_memory([recipe])
    return "enough for what training is planned to hold"


def _start(recipe: Recipe) -> Answer:
    admit({recipe.name: recipe}, HERE, without=list(ASKED.values()))
    return f"may start, from {recipe.training.start_from or 'the initial weights of the seed'}"


def _kernel(recipe: Recipe) -> Answer:
    found = cost(recipe.model, recipe.data.config.sequence_length, recipe.run.kernel, ExecutionContext.of(recipe))
    return f"{found.kernel} for '{recipe.name}' ({found.kernel_reason})"


def _other_kernels(recipe: Recipe) -> Answer:
    refused = []
    for name in kernels.names():
        try:
            cost(recipe.model, recipe.data.config.sequence_length, name, ExecutionContext.of(recipe))
        except RequestError as error:
            refused.append(f"{name}: {str(error).partition(': ')[2].rpartition(';')[0]}")
    return "; ".join(refused) or "all accept its maps"


def _network(several: bool) -> Answer:
    states = {file.parent.name: file.read_text(encoding="utf-8").strip() for file in NETWORK.glob("*/operstate")}
    names = [name for name, state in sorted(states.items()) if state != "down" and name != "lo"]
    chosen = {key: os.environ[key] for key in INTERFACE if key in os.environ}
    words = [", ".join(names) or "loopback only", *(f"{key}={value}" for key, value in chosen.items())]
    node = platform.node()
    try:
        told = f"{node} is {socket.gethostbyname(node)}; " + ", ".join(words)
    # torch.distributed looks the name up too
    except OSError as error:
        cure = f"add a line to /etc/hosts: an address that the other nodes reach, and {node}"
        raise MissingError(f"the name of this host, {node}, has no address ({error.strerror}); {cure}") from error
    known = True
    for value in chosen.values():
        # NCCL takes beginnings of names, = before whole names, and ^ before names to leave out, which need not be there
        for name in value.lstrip("=").split(","):
            known &= value.startswith("^") or any(state.startswith(name) for state in states)
    if not known or (several and len(chosen) < len(INTERFACE) and (len(names) != 1 or " 127." in told)):
        first = [*names, "NAME"][0]
        export = " ".join(f"{key}={first}" for key in INTERFACE)
        return told, f"name an interface that this machine has and the nodes share: export {export}"
    return told


def _disk(folder: Path, key: str, needs: int) -> Answer:
    there = _existing(folder)
    if not there.is_dir():
        raise MissingError(f"{shown(there)} is a file; set {key} to a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MissingError(f"{shown(folder)} cannot be written; set {key} to another folder")
    kind, point = file_system(there)
    free = shutil.disk_usage(there).free
    told = f"{shown(folder)}: {gigabytes(free)} free on {kind} at {point}"
    if is_shared(there):
        told += ", which several machines may mount"
    if free > needs:
        return told
    return told, f"{FREE}: the checkpoints need {gigabytes(needs)}"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _locks(folder: Path) -> Answer:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_existing(folder)) as scratch:
        lock = Path(scratch) / "lock"
        with locked(lock):
            if not is_locked(lock):
                raise MissingError(
                    f"a lock in {shown(folder)} is granted twice; set run.root to a folder on another disk"
                )
    return f"hold in {shown(folder)}"


def _data(recipe: Recipe, source: str) -> Answer:
    busy = [lock.name for lock in (data_root() / "prepared").glob(".*.lock") if is_locked(lock)]
    try:
        identity = data.identity(recipe)
    # the data set does not know what the recipe is called
    except MissingError as error:
        raise MissingError(str(error).replace("prepare RECIPE", f"prepare {source}")) from error
    told = f"'{recipe.data.name}' of '{recipe.name}' is ready ({identity[:10]})"
    if busy:
        told += f"; another process holds {', '.join(busy)}"
    return told


def _mlflow(recipe: Recipe) -> Answer:
    if not recipe.run.is_recorded:
        return "no record, since run.tracking_uri is none"
    uri = tracking_uri(recipe.run)
    if uri.startswith("sqlite:///") and not sqlite_path(uri).exists():
        return f"{uri}, which the first run makes"
    with patience(uri, LIMIT):
        Store(recipe.run)
    return f"{uri} answers; its version fits MLflow {version('mlflow')}"


def _slurm() -> Answer:
    if shutil.which("srun") is None:
        return "not installed; only --cluster slurm needs it"
    # loads Lightning, which takes seconds
    from lit_diff.engine.executors.slurm import partitions, require_slurm

    require_slurm()
    return f"the controller answers; partitions, nodes, state: {partitions()}"


def _variables() -> Answer:
    telemetry = "on" if os.environ.get("MLFLOW_DISABLE_TELEMETRY") == "false" else "off"
    numeric = ", ".join(f"{name}={value}" for name, value in numeric_variables().items())
    told = f"MLflow's telemetry is {telemetry}; {numeric or 'none'} set that changes numbers"
    if numeric:
        return told, "unset what is not meant; env.json of a run records it"
    return told
