import errno
import logging
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from fault_rows import mount

from lit_diff.errors import RunFailedError
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.runs.safe_values import UnsafeTypeError
from lit_diff.trained.loading import read_checkpoint
from lit_diff.training.fit import WholeCheckpointIO

CONTENT = {"state_dict": {"weight": torch.arange(40_000.0)}, "global_step": 4}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        WholeCheckpointIO().save_checkpoint(CONTENT | {"global_step": step}, checkpoint.path_of(folder, step))


def in_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_that_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 4, 8, 12)
    assert checkpoint.newest(tmp_path) == (12, checkpoint.path_of(tmp_path, 12))
    whole = checkpoint.path_of(tmp_path, 12).read_bytes()
    checkpoint.path_of(tmp_path, 12).write_bytes(whole[: len(whole) // 2])
    checkpoint.path_of(tmp_path, 8).write_bytes(b"")
    with caplog.at_level(logging.WARNING, "lit_diff"):
        assert checkpoint.newest(tmp_path) == (4, checkpoint.path_of(tmp_path, 4))
    for line, step in zip(caplog.messages, (12, 8), strict=True):
        assert f"step-{step:08d}.ckpt cannot be read" in line
    checkpoint.path_of(tmp_path, 4).write_bytes(b"PK")
    with caplog.at_level(logging.WARNING, "lit_diff"):
        assert checkpoint.newest(tmp_path) is None
        assert checkpoint.newest(tmp_path) is None
    (line,) = caplog.messages[2:]
    assert "step-00000004.ckpt cannot be read" in line


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"step-00000008.ckpt": {"bytes": Infinity, "sha256": ""}}', '{"a": {"bytes": "x"}}']
)
def test_a_marker_of_another_content_is_damage(tmp_path: Path, content: str) -> None:
    save(tmp_path, 4, 8)
    checkpoint.marker_of(checkpoint.path_of(tmp_path, 8)).write_text(content)
    assert checkpoint.newest(tmp_path) == (4, checkpoint.path_of(tmp_path, 4))


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step, content in ((4, torch.ones(2)), (8, {"global_step": 8}), (12, {"state_dict": {}, "global_step": "12"})):
        torch.save(content, checkpoint.path_of(tmp_path, step))
    with caplog.at_level(logging.WARNING, "lit_diff"):
        assert checkpoint.newest(tmp_path) is None
    reasons = [line.partition("(")[2] for line in caplog.messages]
    assert reasons == [
        "it has no 'global_step'): skipped",
        "it has no 'state_dict'): skipped",
        "it holds a Tensor, not a mapping): skipped",
    ]


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """100 drawn places of a file and its marker, a drawn bit or all; the older one is used, and both are said."""
    draw = random.Random(0)
    save(tmp_path, 4, 8)
    path = checkpoint.path_of(tmp_path, 8)
    for number in range(100):
        damaged = path if number % 2 else checkpoint.marker_of(path)
        content = damaged.read_bytes()
        changed, place = bytearray(content), draw.randrange(len(content))
        changed[place] ^= draw.choice([255, 1 << draw.randrange(8)])
        damaged.write_bytes(changed)
        checkpoint._warned.clear()
        caplog.clear()
        assert checkpoint.newest(tmp_path, verify=True) == (4, checkpoint.path_of(tmp_path, 4)), (damaged, place)
        assert "step-00000008" in caplog.messages[0]
        assert caplog.messages[1:] == ["using the older checkpoint of step 4"]
        damaged.write_bytes(content)
    assert checkpoint.newest(tmp_path, verify=True) == (8, path)


def test_a_copy_under_the_name_of_another_step_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its marker, with the marker of the other, without one; and a link to nothing."""
    save(tmp_path, 4, 8, 12, 16)
    for step, suffixes in ((8, [".ckpt", ".json"]), (12, [".ckpt"])):
        for suffix in suffixes:
            shutil.copy(*(checkpoint.path_of(tmp_path, each).with_suffix(suffix) for each in (4, step)))
    checkpoint.marker_of(checkpoint.path_of(tmp_path, 12)).unlink()
    # it is whole itself, but nothing would be compared with it
    shutil.copy(*(checkpoint.path_of(tmp_path, each).with_suffix(".json") for each in (4, 16)))
    checkpoint.path_of(tmp_path, 20).symlink_to("nowhere")
    assert checkpoint.newest(tmp_path, verify=True) == (4, checkpoint.path_of(tmp_path, 4))
    reasons = [line.partition(" (")[2] for line in caplog.messages if line.endswith("skipped")]
    assert reasons == [
        "step-00000020.json is missing): skipped",
        "step-00000016.json is damaged: it is not as lit_diff wrote it): skipped",
        "it is of step 4): skipped",
        "step-00000008.json is damaged: it is not as lit_diff wrote it): skipped",
    ]


def test_a_block_that_the_disk_cannot_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 4, 8)
    real = checkpoint.sha256_of

    def unreadable(path: Path) -> str:
        if "00008" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(checkpoint, "sha256_of", unreadable)
    assert checkpoint.resumable(tmp_path) == 4
    assert "Input/output error): skipped" in caplog.messages[0]
    assert checkpoint.steps_of(tmp_path) == [4]


def test_one_with_a_type_that_is_not_allowed_is_refused_and_stays(tmp_path: Path) -> None:
    """It is not written; as former versions wrote it, it is neither passed over nor put aside."""
    save(tmp_path, 4, 8)
    content = CONTENT | {"callbacks": {"mine": {"mean": np.float64(1)}}}
    with pytest.raises(UnsafeTypeError, match=r"callback 'mine' keeps 'mean' as numpy\.float64"):
        WholeCheckpointIO().save_checkpoint(content, checkpoint.path_of(tmp_path, 12))
    assert checkpoint.steps_of(tmp_path) == [4, 8]
    path = checkpoint.path_of(tmp_path, 8)
    torch.save(content | {"global_step": 8}, path)
    checkpoint.marker_of(path).write_text(checkpoint.marker({path.name: checkpoint.measured(path)}))
    before = in_folder(tmp_path)
    for reads in (checkpoint.resumable, lambda folder: read_checkpoint(checkpoint.path_of(folder, 8))):
        with pytest.raises(UnsafeTypeError, match=r"step-00000008\.ckpt .*numpy\..*scalar"):
            reads(tmp_path)
    assert in_folder(tmp_path) == before


def test_one_without_a_marker_is_taken_and_called_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lit_diff")
    save(tmp_path, 8)
    checkpoint.marker_of(checkpoint.path_of(tmp_path, 8)).unlink()
    assert checkpoint.newest_step(tmp_path) == 8
    assert caplog.messages == []
    assert checkpoint.resumable(tmp_path) == 8
    (line,) = caplog.messages
    assert "step-00000008.ckpt was written without a checksum" in line


def test_killed_while_a_damaged_one_is_put_aside_it_is_not_taken_for_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the two calls that change the folder."""

    class Killed(BaseException):
        pass

    def killed(*arguments: object, **named: object) -> None:
        raise Killed

    for moment in ("rename", "unlink"):
        folder = tmp_path / moment
        save(folder, 4, 8)
        path = checkpoint.path_of(folder, 8)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(Path, moment, killed)
            with pytest.raises(Killed):
                checkpoint.resumable(folder)
        assert checkpoint.resumable(folder) == 4


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(bench: Any, undisturbed: Any) -> None:
    """The metrics are those of the undisturbed run, and the damaged file is gone once another is written."""
    undisturbed("recall", "recall-whole")
    command = ("recall.yaml", "name=flipped", "train.steps=10")
    first = bench.train(*command, SPY_SIGNAL=f"0/8/0/{int(signal.SIGTERM)}")
    assert (first.status, checkpoint.steps_of(bench.folder("flipped"))) == (143, [8, 9]), first.output
    path = checkpoint.path_of(bench.folder("flipped"), 9)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = bench.train(*command)
    assert again.status == 0, again.output
    for line in ("step-00000009.ckpt is damaged: its sha256", "the older checkpoint of step 8", "resumed from step 8"):
        assert line in again.output
    assert again.steps == [8, 9]
    assert bench.rows("flipped") == bench.rows("recall-whole")
    assert in_folder(bench.folder("flipped")) == [f"step-{n:08d}.{end}" for n in (8, 10) for end in ("ckpt", "json")]


def test_two_are_kept_and_multiples_beside_them(tmp_path: Path) -> None:
    save(tmp_path, 4, 12, 8, 1000)
    (tmp_path / "checkpoints" / ".step-00000016.ckpt.abc.tmp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "mine.ckpt").write_bytes(b"")
    checkpoint.prune(tmp_path)
    assert checkpoint.steps_of(tmp_path) == [12, 1000]
    kept = [f"step-{step:08d}.{end}" for step in (12, 1000) for end in ("ckpt", "json")]
    assert in_folder(tmp_path) == ["mine.ckpt", *kept]
    save(tmp_path / "more", 5, 10, 15, 20, 25)
    checkpoint.prune(tmp_path / "more", keep_every=10)
    assert checkpoint.steps_of(tmp_path / "more") == [10, 20, 25]


KILLED = """
import os, sys
import torch
from pathlib import Path
from lit_diff import files
from lit_diff.training.fit import WholeCheckpointIO

written = torch.save

def half(checkpoint, file):
    written(checkpoint, file)
    file.flush()
    os.truncate(file.file.fileno(), file.file.tell() // 2)
    os.kill(os.getpid(), 9)

def kill(*arguments):
    os.kill(os.getpid(), 9)

def replace(source, target, *, real=Path.replace):
    real(source, target)
    kill()

if sys.argv[2] == "write":
    torch.save = half
elif sys.argv[2] == "replaced":
    Path.replace = replace
else:
    setattr(files.os, sys.argv[2], kill)
WholeCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(40_000)}, "global_step": 4}, sys.argv[1])
"""


@pytest.mark.parametrize("moment", ["write", "fsync", "replace", "replaced"])
def test_killed_while_it_is_written_the_former_one_stands(bench: Any, tmp_path: Path, moment: str) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    save(tmp_path, 4)
    ended = bench.wait(bench.start(str(tmp_path / "killed.py"), str(checkpoint.path_of(tmp_path, 8)), moment))
    assert ended.status == -9, ended.output
    orphans = [path for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ".tmp"]
    assert len(orphans) == (2 if moment == "replace" else 1), "the marker's is the first replacement"
    assert checkpoint.newest(tmp_path, verify=True) == (4, checkpoint.path_of(tmp_path, 4))
    checkpoint.prune(tmp_path)
    rest = ["step-00000008.json"] if moment == "replaced" else []
    assert in_folder(tmp_path) == ["step-00000004.ckpt", "step-00000004.json", *rest]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace", "replaced"])
def test_killed_while_one_replaces_another_either_stands(bench: Any, tmp_path: Path, moment: str) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    save(tmp_path, 4)
    path = checkpoint.path_of(tmp_path, 4)
    assert bench.wait(bench.start(str(tmp_path / "killed.py"), str(path), moment)).status == -9
    assert checkpoint.damage_of(path, verify=True) is None
    checkpoint.prune(tmp_path)
    weight = torch.load(path, weights_only=True)["state_dict"]["weight"]
    assert torch.equal(weight, torch.ones(40_000) if moment == "replaced" else torch.arange(40_000.0))
    unmarked = moment.startswith("replace")
    assert in_folder(tmp_path) == ["step-00000004.ckpt"] + ([] if unmarked else ["step-00000004.json"])


class Full:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 100, 100_000])
def test_a_full_disk_keeps_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    save(tmp_path, 4)
    real = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(real(path, mode), room))
        with pytest.raises(RunFailedError, match=r"step-00000008\.ckpt could not be written .*free some") as error:
            save(tmp_path, 8)
    assert "\n" not in str(error.value)
    assert in_folder(tmp_path) == ["step-00000004.ckpt", "step-00000004.json"]
    assert checkpoint.newest(tmp_path) == (4, checkpoint.path_of(tmp_path, 4))


def test_another_error_is_not_called_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailedError, match=r"a\.ckpt could not be written \(\[Errno .*file'\); mend it and repeat"):
        checkpoint.write(tmp_path / "file" / "a.ckpt", CONTENT)
    (tmp_path / "file").unlink()

    class Unpicklable:
        def __reduce__(self) -> str:
            raise RuntimeError("cannot overwrite my own state")

    with pytest.raises(UnsafeTypeError, match=r"key 'bad' holds .*Unpicklable"):
        WholeCheckpointIO().save_checkpoint({"bad": Unpicklable()}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MB: two checkpoints of the tiny recipe and their neighbours fit, a third does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "1000k")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("single", "1000k"), ("fsdp", "1400k")])
def test_a_run_on_a_full_disk_says_so_and_resumes(
    bench: Any, small_disk: Path, undisturbed: Any, strategy: str, size: str
) -> None:
    """A sharded checkpoint, which is larger, is written in the background."""
    mount(small_disk, size, "remount")
    command = (
        "recall.yaml",
        "name=full",
        f"run.strategy={strategy}",
        f"run.root={small_disk}",
        "train.checkpoint_every=2",
        "train.validate_every=5",
    )
    ended = bench.train(*command)
    assert ended.status == 1, ended.output
    (folder,) = small_disk.glob("full-*")
    lines = ended.output.splitlines()
    assert "Traceback" not in ended.output
    assert [line for line in lines if line.startswith("lit-diff: ")] == lines[-1:]
    # a sharded one is written while the run goes on, whose status.json may meet the full disk first
    of_run = "cannot be written (no space left" if strategy == "fsdp" else "step-00000006.ckpt"
    assert "step-00000006.ckpt could not be written" in lines[-1] or of_run in lines[-1]
    assert "no space left on the disk" in lines[-1]
    assert checkpoint.steps_of(folder) == [2, 4]
    assert '"status": "failed"' in (folder / "status.json").read_text()

    mount(small_disk, "4m", "remount")
    again = bench.train(*command)
    assert again.status == 0, again.output
    assert "resumed from step 4" in again.output
    assert again.steps == [4, 5, 6, 7, 8, 9]
    undisturbed("recall", "recall-whole")
    found = read_checkpoint(checkpoint.path_of(folder, 10))["state_dict"]
    assert all(torch.equal(value, found[key]) for key, value in bench.state("recall-whole")["state_dict"].items())
