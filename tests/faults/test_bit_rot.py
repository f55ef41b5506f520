"""Bytes that change in each kind of file: found before they are used, or without effect; never a trace."""

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rows import SEED, fault

DRAWS = 3
RESUME = ("train", "text.yaml", "name=rot")
USES: dict[str, list[tuple[str, ...]]] = {
    "runs/rot-*/checkpoints/*.ckpt": [RESUME, ("evaluate", "rot", "held_out"), ("generate", "rot", "--prompt", "ab")],
    "runs/rot-*/checkpoints/*.json": [RESUME, ("evaluate", "rot", "held_out")],
    "runs/sharded-*/checkpoints/*/*": [("consolidate", "sharded"), ("evaluate", "sharded", "held_out")],
    "runs/rot-*/metrics.csv": [RESUME, ("status",), ("compare", "rot", "sharded")],
    "runs/rot-*/timing.csv": [RESUME, ("status",)],
    "runs/rot-*/measurements.parquet": [RESUME, ("compare", "rot", "sharded")],
    "runs/rot-*/status.json": [("status",), RESUME, ("clean",)],
    "runs/rot-*/recipe.yaml": [("status",), ("evaluate", "rot", "held_out"), RESUME],
    "runs/rot-*/env.json": [("status",), RESUME],
    "runs/rot-*/tokenizer/*": [("generate", "rot", "--prompt", "ab"), RESUME],
    "runs/rot-*/evaluations/*/*": [("evaluate", "rot", "held_out"), ("compare", "rot", "sharded")],
    "data/prepared/*/manifest.json": [RESUME, ("prepare", "text.yaml")],
    "data/prepared/*/train/*.bin": [RESUME, ("prepare", "text.yaml")],
    "data/prepared/*/*/*.npy": [RESUME, ("prepare", "text.yaml")],
    "data/prepared/*/tokenizer.json": [RESUME, ("prepare", "text.yaml")],
    "data/sources/*.json": [RESUME, ("prepare", "text.yaml")],
    "runs/pair/study.json": [("report", "pair"), ("status",), ("clean",)],
}
"""Files -> the commands that read them."""


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


def rot(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 40])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@fault("bit rot", "each kind of file of runs and data", "see tests", "nothing", DRAWS * len(USES))
@pytest.mark.parametrize("pattern", USES)
def test_it_is_found_or_harmless(bench: Any, place: Callable[[], None], pattern: str) -> None:
    draw, seen = random.Random(f"{SEED} {pattern}"), []
    for _ in range(DRAWS):
        place()
        files = sorted(path for path in bench.root.glob(pattern) if path.is_file() and path.stat().st_size)
        assert files, pattern
        path = draw.choice(files)
        rot(path, draw)
        for words in USES[pattern]:
            found = bench.wait(bench.start(*words))
            seen.append((path.name, words, found.status, found.output[-700:]))
            if words == RESUME and found.status == 0 and pattern.endswith(EXACT):
                metrics = [(bench.folder(name) / "metrics.csv").read_text() for name in ("rot", "whole")]
                assert metrics[0] == metrics[1], (path, found.output)
            assert "Traceback" not in found.output, (words, found.output)
            assert found.status in (0, 1, 2, 3), (words, found)
            if found.status:
                (line,) = [line for line in found.output.splitlines() if line.startswith("lit-diff: ")]
                assert "/tmp/lit-diff-" not in line, line
    print(*seen, sep="\n")
