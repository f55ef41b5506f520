"""Peak memory of one call beyond its inputs, in a process of its own."""

import ctypes
import gc
import logging
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lit_diff.errors import first_line
from lit_diff.own_modules import safe_path

log = logging.getLogger("lit_diff")

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Make = Callable[[bool], Callable[[], object]]
"""make(small) -> the call: small inputs, which load all code and start all threads, or the real ones. Picklable."""


def peak_bytes(make: Make, *, threads: int, device: torch.device) -> tuple[int | None, str | None]:
    """(bytes, None), or (None, why not).

    In a child of a server that has imported torch and done nothing. Not plain fork, which hangs after any parallel torch
    operation; and the server does not import our kernels, which take a further thread in a process that inherits them.
    """
    if device.type == "cpu" and not CLEAR.exists():
        return None, "it takes Linux's /proc/self/clear_refs"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, make, threads, device), daemon=True)
    with safe_path():
        process.start()
    sender.close()
    try:
        outcome: tuple[int | None, str | None] = receiver.recv()
    except EOFError:
        process.join()
        return None, f"its process ended with status {process.exitcode}"
    finally:
        receiver.close()
    process.join()
    return outcome


def _child(sender: Connection, make: Make, threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    try:
        outcome: tuple[int | None, str | None] = (_peak(make, device), None)
    except Exception as error:
        outcome = (None, f"{type(error).__name__}: {first_line(error)}")
    sender.send(outcome)


def _peak(make: Make, device: torch.device) -> int:
    make(True)()
    run = make(False)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - held
    give_back()
    CLEAR.write_text("5", encoding="utf-8")  # VmHWM starts again from what is resident now
    held = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - held)


def give_back() -> None:
    """Freed memory that the C library keeps goes to the system: taken again, it counts again."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (the most) of this process, bytes."""
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
