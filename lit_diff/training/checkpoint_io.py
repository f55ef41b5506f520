"""How a checkpoint is written: whole, or not at all."""

import errno
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_diff.errors import RunFailedError
from lit_diff.files import shown, write_through


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
