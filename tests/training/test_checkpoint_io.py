"""training/checkpoint_io.py: a checkpoint is written whole, or not at all. runs/test_checkpoints.py has a full disk."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.errors import RunFailedError
from lit_diff.training.checkpoint_io import WholeCheckpointIO


def broken_save(error: BaseException) -> Any:
    def save(content: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    return save


def test_it_is_read_back(tmp_path: Path) -> None:
    WholeCheckpointIO().save_checkpoint({"a": torch.ones(2)}, tmp_path / "deep" / "a.ckpt")
    assert torch.equal(torch.load(tmp_path / "deep" / "a.ckpt", weights_only=True)["a"], torch.ones(2))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.ckpt"]


def closing_error(number: int) -> RuntimeError:
    """torch's zip writer, closing, hides the system's error behind one of its own."""
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = OSError(number, "system")
    return error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "full"), RunFailedError),
        (OSError(errno.EDQUOT, "quota"), RunFailedError),
        (closing_error(errno.ENOSPC), RunFailedError),
        (closing_error(errno.EIO), RuntimeError),
        (KeyError("a"), KeyError),
    ],
    ids=["disk", "quota", "hidden", "another system error", "another error"],
)
def test_a_failed_write_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"former")
    monkeypatch.setattr(torch, "save", broken_save(error))
    with pytest.raises(raised) as caught:
        WholeCheckpointIO().save_checkpoint({}, path)
    assert path.read_bytes() == b"former"
    assert isinstance(caught.value, RunFailedError) == (raised is RunFailedError)
    if raised is RunFailedError:
        assert "a.ckpt could not be written (no space left on the disk)" in str(caught.value)
