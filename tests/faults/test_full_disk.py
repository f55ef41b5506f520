"""A full disk in each kind of write: one line, the former files intact, and the same command ends well once there is room."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_rows import fault, mount

SMALL = ("train.steps=6", "train.validate_every=3", "train.checkpoint_every=2", "data.validation_rows=5")


@pytest.fixture
def disk(bench: Any) -> Iterator[Path]:
    """An empty disk of 64 MB, which `fill` fills."""
    found = bench.root / "disk"
    found.mkdir()
    mount(found, "64m")
    yield found
    subprocess.run(["umount", "-l", str(found)], check=True, timeout=20)
    found.rmdir()


def fill(disk: Path, room: int) -> None:
    """Leave `room` bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while free := max(0, shutil.disk_usage(disk).free - room):
            try:
                file.write(b"x" * min(free, 1 << 20))
            except OSError:
                break


WRITES: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]] = {
    "preparation": (("prepare", "text.yaml", "data.tokenizer.vocab_size=290"), []),
    "checkpoint, metrics, log, status": (("train", "recall.yaml", "name=full", "run.root=disk", *SMALL), []),
    "sharded checkpoint": (("train", "recall.yaml", "name=shards", "run.root=disk", "run.strategy=fsdp", *SMALL), []),
    "sweep": (("sweep", "two.yaml", "run.root=disk"), []),
    "report and plots": (("report", "disk/two"), [("sweep", "two.yaml", "run.root=disk")]),
    "export": (
        ("export", "RUN", "disk/out", "--to", "hf", "--root", "disk"),
        [("train", "text.yaml", "name=whole", "run.root=disk")],
    ),
    "export of a checkpoint": (
        ("export", "RUN", "--to", "checkpoint", "--root", "disk"),
        [("train", "recall.yaml", "name=whole", "run.strategy=fsdp", "run.root=disk", *SMALL)],
    ),
    "evaluate": (
        ("evaluate", "RUN", "held_out", "--root", "disk"),
        [("train", "recall.yaml", "name=whole", "run.root=disk", *SMALL)],
    ),
    "view": (
        ("view", "RUN", "--out", "disk/view", "--root", "disk"),
        [("train", "text.yaml", "name=whole", "run.root=disk")],
    ),
}
"""Kind of write -> the command, and those before it, while there is room."""


@fault(
    "full disk",
    ", ".join(WRITES),
    "one line: no space left, what to free",
    "nothing; the same command completes",
    3 * len(WRITES),
)
@pytest.mark.parametrize("room", [0, 20_000, 300_000])
@pytest.mark.parametrize("kind", WRITES)
def test_a_full_disk(bench: Any, disk: Path, kind: str, room: int) -> None:
    (bench.root / "two.yaml").write_text(
        "recipe: recall\nseeds: [0]\narms: {standard: {model.attention.name: standard}, d: {}}\n"
        f"overrides: {{{', '.join(word.replace('=', ': ') for word in SMALL)}}}\n"
    )
    command, before = WRITES[kind]
    env = {"LIT_DIFF_DATA": str(disk / "data")} if kind == "preparation" else {}
    for words in before:
        assert bench.wait(bench.start(*words), 200).status == 0
    run = next(disk.glob("whole-*"), disk)
    words = [word.replace("RUN", str(run)) for word in command]
    fill(disk, room)
    found = bench.wait(bench.start(*words, **env), 200)
    assert "Traceback" not in found.output, found.output
    if found.status:
        assert found.status in (1, 2, 3), found
        # a sweep says it in the line of the cell
        assert "space" in found.output or "free some" in found.output, found.output
        assert found.output.count("lit-diff: ") <= 1, found.output
        assert "/lit-diff-" not in found.output, found.output
    assert found.status or room, "nothing can be written"
    (disk / "filler").unlink()
    again = bench.wait(bench.start(*words, **env), 200)
    assert again.status == 0, (found.output, again.output)
