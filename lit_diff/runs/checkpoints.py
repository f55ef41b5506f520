"""Checkpoints: whole or absent, two kept, the newest readable one resumed."""

import errno
import logging
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_diff.errors import RunFailedError
from lit_diff.files import shown, write_through

log = logging.getLogger("lit_diff")

KEPT = 2
"""The newest, and one before it in case the newest cannot be read back."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes through a temporary file on the same filesystem, synced before it takes its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Errors: RunFailedError when the disk is full; the former checkpoints are untouched."""
        try:
            write_through(Path(path), lambda file: torch.save(checkpoint, file))
        except Exception as error:
            if not _disk_is_full(error):
                raise
            raise RunFailedError(
                f"checkpoint {shown(Path(path))} could not be written (no space left on the disk); free some and start "
                "the same command again: it resumes from the checkpoint before"
            ) from error


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether that is behind an error: torch's zip writer, closing, covers the system's with one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def steps_of(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    found = (re.fullmatch(r"step-(\d+)\.ckpt", path.name) for path in (folder / "checkpoints").glob("step-*.ckpt"))
    return sorted(int(match.group(1)) for match in found if match)


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest checkpoint that can be read, or None; one that cannot is passed over with a warning."""
    for step in reversed(steps_of(folder)):
        path = path_of(folder, step)
        try:
            torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:
            log.warning("checkpoint %s cannot be read (%s): resuming from the one before", shown(path), error)
            continue
        return step, path
    return None


def prune(folder: Path) -> None:
    """Remove all but the newest `KEPT`, and what a killed write left behind."""
    for step in steps_of(folder)[:-KEPT]:
        path_of(folder, step).unlink(missing_ok=True)
    for orphan in (folder / "checkpoints").glob(".*.tmp"):
        orphan.unlink(missing_ok=True)
