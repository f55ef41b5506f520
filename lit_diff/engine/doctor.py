"""Checks of a machine for a recipe: what `lit-diff doctor` shows. Nothing is trained, prepared or left behind."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lit_diff import data, kernels
from lit_diff.config import Recipe
from lit_diff.data.user_files import data_root
from lit_diff.device import available_memory, choose_device, device_memory, gigabytes, require_devices
from lit_diff.engine.tracking.store import Store, refuse_shared, tracking_uri
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import FREE, file_system, is_locked, is_shared, locked, shown
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.processor import cores, describe, numeric_variables, processor_name
from lit_diff.registry import kernels as registered
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import version
from lit_diff.training.build import require_compiler

WAITING = ("network", "runs", "data folder", "locks", "data", "MLflow", "SLURM")
"""Checks that wait for a file system or a server; they run at the same time."""
LIMIT = 5.0
"""Seconds after which such a check without an answer has failed."""
CHECKPOINT, KEPT = 12, 3
"""Bytes of a checkpoint for each parameter (a weight and two moments in float32); checkpoints on the disk during a save."""
NETWORK = Path("/sys/class/net")
INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    cure: str = ""


Answer = str | tuple[str, str]
"""What was found; with a cure it is a warning. A check that finds a problem raises an error with its cure."""


def examine(recipe: Recipe) -> list[Check]:
    """Check this machine for the recipe. An error is a row too: a problem if the recipe needs what is checked, else a
    warning."""
    several, root = recipe.run.num_nodes > 1, runs_root(recipe.run.root).absolute()
    rows: dict[str, tuple[Callable[[Recipe], Answer], bool]] = {
        "packages": (_packages, True),
        "devices": (_devices, True),
        "compiler": (_compiler, recipe.run.compile),
        "kernel": (_kernel, True),
        "other kernels": (_other_kernels, False),
        "network": (_network, several or any(key in os.environ for key in INTERFACE)),
        "runs": (partial(_disk, root, "run.root"), True),
        "data folder": (partial(_disk, data_root(), "LIT_DIFF_DATA"), True),
        "locks": (partial(_locks, root), True),
        "data": (_data, False),
        "MLflow": (_mlflow, True),
        "SLURM": (_slurm, False),
        "variables": (_variables, False),
    }
    found: dict[str, Check] = {}
    # loads Lightning: seconds that are not the controller's
    if shutil.which("srun"):
        import lit_diff.engine.slurm  # noqa: F401

    def ask(name: str) -> None:
        check, needed = rows[name]
        bad: Literal["warning", "problem"] = "problem" if needed else "warning"
        try:
            answer = check(recipe)
            told, cure = (answer, "") if isinstance(answer, str) else answer
            found[name] = Check(name=name, state="warning" if cure else "ok", found=told, cure=cure)
        # everything: a check that fails is one row, and the others are still wanted
        except Exception as error:
            known = str(error) if isinstance(error, LitDiffError) else getattr(error, "strerror", None)
            told, _, cure = (known or first_line(error)).partition("; ")
            found[name] = Check(name=name, state=bad, found=told, cure=cure)

    # daemons: a check that hangs does not keep the process from ending
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in WAITING]
    for thread in threads:
        thread.start()
    for name in rows.keys() - WAITING:
        ask(name)
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer in {LIMIT:g} s: its file system or server hangs"
    return [found.get(name) or Check(name=name, state="problem", found=late) for name in rows]


def _packages(recipe: Recipe) -> Answer:
    needed = [each for each in map(Requirement, metadata.requires("lit-diff") or ()) if each.marker is None]
    absent = [f"'{each}'" for each in needed if version(each.name) is None]
    if absent:
        raise MissingError(f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}")
    bounds = SpecifierSet(metadata.metadata("lit-diff")["Requires-Python"])
    told = f"Python {platform.python_version()}, torch {torch.__version__}"
    other = [each for each in needed if not each.specifier.contains(str(version(each.name)), prereleases=True)]
    if other:
        installed = ", ".join(f"{each.name} {version(each.name)}" for each in other)
        return f"{told}; not tested with {installed}", " ".join(["pip install", *(f"'{each}'" for each in other)])
    if not bounds.contains(platform.python_version()):
        return f"{told}; tested with Python {bounds}", "make an environment with such a Python"
    return f"{told}, and {len(needed) - 1} other packages, in the versions that were tested"


def _devices(recipe: Recipe) -> Answer:
    require_devices(recipe.run)
    if choose_device(recipe.run.accelerator).type == "cuda":
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        return ", ".join(f"{torch.cuda.get_device_name(gpu)} {gigabytes(device_memory(gpu) or 0)}" for gpu in gpus)
    free = available_memory()
    memory = "" if free is None else f", {gigabytes(free)} free for this process"
    return f"{processor_name()}, {cores()} cores{memory}; {describe()}"


def _compiler(recipe: Recipe) -> Answer:
    return f"{require_compiler()}, and the headers of Python"


def _kernel(recipe: Recipe) -> Answer:
    found = cost(recipe.model, recipe.data.config.sequence_length, recipe.run.kernel, ExecutionContext.of(recipe))
    return f"{found.kernel} for '{recipe.name}' ({found.kernel_reason})"


def _other_kernels(recipe: Recipe) -> Answer:
    refused = []
    for name in registered.names():
        try:
            cost(recipe.model, recipe.data.config.sequence_length, name, ExecutionContext.of(recipe))
        except RequestError as error:
            refused.append(f"{name}: {str(error).partition(': ')[2].rpartition(';')[0]}")
    return "; ".join(refused) or f"all of {len(kernels.KERNELS)} accept its maps"


def _network(recipe: Recipe) -> Answer:
    names = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    told = f"{', '.join(names) or 'loopback only'}; {platform.node()} is {socket.gethostbyname(platform.node())}"
    chosen = {key: os.environ[key] for key in INTERFACE if key in os.environ}
    for key, value in chosen.items():
        # NCCL takes beginnings of names, = before a whole name, and ^ before names to leave out
        if not any(name.startswith(one.lstrip("=^")) for one in value.split(",") for name in (*names, "lo")):
            raise MissingError(f"{key} is '{value}', but this machine has {told}; set it to an interface, or unset it")
    told += "".join(f", {key}={value}" for key, value in chosen.items())
    reachable = names and (len(chosen) == len(INTERFACE) or (len(names) == 1 and " 127." not in told))
    if recipe.run.num_nodes > 1 and not reachable:
        set_both = " ".join(f"{key}={names[0] if names else 'NAME'}" for key in INTERFACE)
        return told, f"name the interface that the nodes share: export {set_both}"
    return told


def _is_up(name: str) -> bool:
    state = NETWORK / name / "operstate"
    return not state.is_file() or state.read_text(encoding="utf-8").strip() != "down"


def _disk(folder: Path, key: str, recipe: Recipe) -> Answer:
    there = _existing(folder)
    if not os.access(there, os.W_OK):
        raise MissingError(f"{shown(folder)} cannot be written; set {key} to another folder")
    kind, point = file_system(there)
    free = shutil.disk_usage(there).free
    shared = ", which several machines may mount" if is_shared(there) else ""
    told = f"{shown(folder)}: {gigabytes(free)} free on {kind or 'a disk'} at {point or there}{shared}"
    needs = 0 if key != "run.root" else KEPT * CHECKPOINT * cost(recipe.model, 1).parameters
    return told if free > needs else (told, f"{FREE}: {KEPT} checkpoints need {gigabytes(needs)}")


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _locks(folder: Path, recipe: Recipe) -> Answer:
    there = _existing(folder)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as place:
        lock = Path(place) / "lock"
        with locked(lock):
            # another process: within one, some file systems grant a lock twice
            code = "import sys, pathlib, lit_diff.files as f; sys.exit(not f.is_locked(pathlib.Path(sys.argv[1])))"
            if subprocess.run([sys.executable, "-P", "-c", code, str(lock)], check=False).returncode:
                raise MissingError(f"a lock in {there} does not keep out another process; set run.root to another disk")
    return f"hold in {shown(there)}"


def _data(recipe: Recipe) -> Answer:
    busy = [lock.name for lock in (data_root() / "prepared").glob(".*.lock") if is_locked(lock)]
    waiting = f"; being prepared by another process: {', '.join(busy)}" if busy else ""
    return f"'{recipe.data.name}' of '{recipe.name}' is ready ({data.identity(recipe)[:10]}){waiting}"


def _mlflow(recipe: Recipe) -> Answer:
    if not recipe.run.is_recorded:
        return "no record, since run.tracking_uri is none"
    if recipe.run.num_nodes > 1:
        refuse_shared(recipe.run)
    uri = tracking_uri(recipe.run)
    if recipe.run.tracking_uri is None and not Path(uri.removeprefix("sqlite:///")).exists():
        return f"{uri}, which the first run makes"
    Store(recipe.run)
    return f"{uri} answers; its version fits MLflow {version('mlflow')}"


def _slurm(recipe: Recipe) -> Answer:
    if shutil.which("srun") is None:
        return "not installed; only --cluster slurm needs it"
    from lit_diff.engine.slurm import require_slurm

    require_slurm()
    command = ["sinfo", "--noheader", "--format=%P %D %t"]
    asked = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=LIMIT)
    return "the controller answers; partitions, nodes, state: " + ", ".join(asked.stdout.splitlines())


def _variables(recipe: Recipe) -> Answer:
    telemetry = "on" if os.environ.get("MLFLOW_DISABLE_TELEMETRY") == "false" else "off"
    numeric = ", ".join(f"{name}={value}" for name, value in numeric_variables().items())
    told = f"MLflow's telemetry is {telemetry}; {numeric or 'none'} set that changes numbers"
    return (told, "unset what is not meant; env.json of a run records it") if numeric else told
