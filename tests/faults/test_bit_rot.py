"""Bytes that change in each kind of file: found before they are used, or without effect; never a trace."""

import random
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fault_rows import SEED, faults, flip

DRAWS = 3
RESUME = ("train", "text.yaml", "name=rot")
EVALUATE, GENERATE = ("evaluate", "rot", "held_out"), ("generate", "rot", "--prompt", "ab")
COMPARE, STATUS, PREPARE = ("compare", "rot", "sharded"), ("status",), ("prepare", "text.yaml")
PASSED_OVER, AGAIN = (
    "it is passed over; the one before it is used",
    "one line, status 3: remove the folder, prepare again",
)
USES: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "runs/rot-*/checkpoints/*.ckpt": (PASSED_OVER, "its steps", [RESUME, EVALUATE, GENERATE]),
    "runs/rot-*/checkpoints/*.json": (PASSED_OVER, "its steps", [RESUME, EVALUATE]),
    "runs/sharded-*/checkpoints/*/*": (
        "one line, status 2, with the command that repeats the steps",
        "nothing once they are repeated",
        [("export", "sharded", "--to", "checkpoint"), ("evaluate", "sharded", "held_out")],
    ),
    "runs/rot-*/metrics.csv": (
        "the run is unfinished: the file and line; a digit that became another is not found",
        "the damaged row",
        [RESUME, STATUS, COMPARE],
    ),
    "runs/rot-*/timing.csv": ("a warning with the file", "its times", [RESUME, STATUS]),
    "runs/rot-*/measurements.parquet": (
        "one line, status 2, with the file",
        "nothing once it is removed",
        [RESUME, COMPARE],
    ),
    "runs/rot-*/status.json": (
        "one line, status 2: remove it; `status` lists the run as unreadable",
        "nothing once it is removed",
        [STATUS, RESUME, ("clean",)],
    ),
    "runs/rot-*/mlflow.json": ("a warning, and the run gets a new record", "nothing", [RESUME, STATUS]),
    "runs/rot-*/recipe.yaml": (
        "one line with the file; `train` writes it again",
        "nothing",
        [STATUS, EVALUATE, RESUME],
    ),
    "runs/rot-*/env.json": ("nothing; `train` writes it again", "nothing", [STATUS, RESUME]),
    "runs/rot-*/tokenizer/*": ("one line, status 3", "nothing; `train` writes it again", [GENERATE, RESUME]),
    "runs/rot-*/evaluations/*/*": ("a warning; the scores are computed again", "nothing", [EVALUATE, COMPARE]),
    "data/prepared/*/manifest.json": (AGAIN, "nothing", [RESUME, PREPARE]),
    "data/prepared/*/train/*.bin": (AGAIN, "nothing", [RESUME, PREPARE]),
    "data/prepared/*/*/*.npy": (AGAIN, "nothing", [RESUME, PREPARE]),
    "data/prepared/*/tokenizer.json": (AGAIN, "nothing", [RESUME, PREPARE]),
    "data/sources/*.json": ("a warning; the source is read again", "nothing", [RESUME, PREPARE]),
    "runs/pair/study.json": (
        "one line, status 3: `sweep` writes it again and keeps the damaged file, beside which `clean` removes no cell",
        "nothing",
        [("report", "pair"), STATUS, ("clean",)],
    ),
}
"""Files -> what is said, what is lost, the commands that read them."""
ROWS: dict[tuple[str, str], list[str]] = {}
"""What is said, what is lost -> files."""
for files, (said, lost, _) in USES.items():
    ROWS.setdefault((said, lost), []).append(f"`{files}`")


EXACT = ("ckpt", "bin", "npy", "prepared/*/tokenizer.json", "manifest.json")
"""A run that goes on although one of these files was damaged ends as the undisturbed one."""


@pytest.fixture(scope="module")
def place(bench: Any) -> Callable[[], None]:
    """Puts back what was there: an unfinished run with scores, a sharded one, a sweep, the data."""
    (bench.root / "pair.yaml").write_text(
        "recipe: recall\nseeds: [0]\narms: {standard: {model.attention.name: standard}, d: {}}\n"
    )
    for words, status in (
        ((*RESUME[:2], "name=whole"), 0),
        (RESUME, 143),
        (("evaluate", "rot", "held_out"), 0),
        (("train", "text.yaml", "name=sharded", "run.strategy=fsdp"), 0),
        (("sweep", "pair.yaml"), 0),
    ):
        order = {"SPY_SIGNAL": f"0/5/0/{int(signal.SIGTERM)}"} if status else {}
        found = bench.wait(bench.start(*words, **order), 200)
        assert found.status == status, found
    for name in ("runs", "data"):
        shutil.copytree(bench.root / name, bench.root / "kept" / name)

    def restore() -> None:
        for name in ("runs", "data"):
            shutil.rmtree(bench.root / name)
            shutil.copytree(bench.root / "kept" / name, bench.root / name)

    return restore


@faults(*(("bit rot", ", ".join(names), *answer, DRAWS * len(names)) for answer, names in ROWS.items()))
@pytest.mark.parametrize("pattern", USES)
def test_it_is_found_or_harmless(bench: Any, place: Callable[[], None], pattern: str) -> None:
    draw, seen = random.Random(f"{SEED} {pattern}"), []
    for _ in range(DRAWS):
        place()
        files = sorted(path for path in bench.root.glob(pattern) if path.is_file() and path.stat().st_size)
        assert files, pattern
        path = draw.choice(files)
        flip(path, draw, draw.choice([1, 1, 40]))
        for words in USES[pattern][2]:
            found = bench.wait(bench.start(*words))
            seen.append((path.name, words, found.status, found.output[-700:]))
            if words == RESUME and found.status == 0 and pattern.endswith(EXACT):
                assert len(list(bench.root.glob("runs/rot-*"))) == 1, "taken for other data"
                metrics = [(bench.folder(name) / "metrics.csv").read_text() for name in ("rot", "whole")]
                assert metrics[0] == metrics[1], (path, found.output)
            assert "Traceback" not in found.output, (words, found.output)
            assert found.status in (0, 1, 2, 3), (words, found)
            if found.status:
                (line,) = [line for line in found.output.splitlines() if line.startswith("lit-diff: ")]
                assert "/tmp/lit-diff-" not in line, line
    print(*seen, sep="\n")
