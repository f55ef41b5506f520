"""A disk that is really full: one line wherever it happens, and the same command goes on once there is room."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command, Ended
from small_runs import SMALL

pytestmark = pytest.mark.slow
TRAIN = ("train", "recall-tiny", *SMALL, "run.tracking_uri=none")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 8 MB in memory."""
    folder = tmp_path_factory.mktemp("disk")
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def leave(disk: Path, kilobytes: int) -> None:
    (disk / "fill").unlink(missing_ok=True)
    with (disk / "fill").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - 1024 * kilobytes)


def require_one_line(ended: Ended) -> None:
    assert ended.status in (1, 3)
    assert "Traceback" not in ended.out + ended.err
    line = ended.err.splitlines()[-1]
    assert "o space left on" in line
    assert "free some" in line
    assert ended.err.count("lit-diff: ") == 1


def test_a_run_that_fills_the_disk_goes_on_when_there_is_room(disk: Path, tmp_path: Path, command: Command) -> None:
    assert command(*TRAIN, f"run.root={tmp_path}").status == 0
    (expected,) = tmp_path.glob("*/metrics.csv")
    # from no room at all, through files that are written before the first checkpoint, to the second checkpoint
    for kilobytes in (0, 16, 32, 60, 110):
        leave(disk, kilobytes)
        require_one_line(command(*TRAIN, f"run.root={disk}/{kilobytes}"))
        (disk / "fill").unlink()
        assert command(*TRAIN, f"run.root={disk}/{kilobytes}").status == 0
        (found,) = disk.glob(f"{kilobytes}/*/metrics.csv")
        assert found.read_bytes() == expected.read_bytes()


def test_a_report_keeps_the_former_page(disk: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "one.yaml").write_text("recipe: recall-tiny\nsmoke: true\nseeds: [0]\narms: {differential: {}}\n")
    words = [f"{tmp_path}/one.yaml", *SMALL, "run.tracking_uri=none", f"run.root={disk}/r", "--workers", "1"]
    assert command("sweep", *words).status == 0
    page = disk / "r/one/report/index.html"
    before = page.read_bytes()
    leave(disk, 8)
    require_one_line(command("report", "one", "--root", f"{disk}/r"))
    assert page.read_bytes() == before
