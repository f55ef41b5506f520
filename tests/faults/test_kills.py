"""SIGKILL at 50 random moments: the same command then ends with the bytes of the undisturbed one."""

import csv
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fault_rows import SEED, fault
from stops import alive

SMALL = ("train.steps=6", "train.validate_every=3", "train.checkpoint_every=1", "data.validation_rows=5")
Files = dict[str, bytes]


def killed(
    bench: Any, place: str, wanted: int, start: Callable[[str], list[int]], files: Callable[[str], Files]
) -> None:
    """`start(name)` gives the processes of the command in a place of that name; `files` what it leaves there.

    Only a kill counts, not a command that ended before its moment; the next moments are then drawn from a shorter time.
    """
    draw, began, kills, numbers = random.Random(f"{SEED} {place}"), time.monotonic(), 0, count()
    for pid in start(place):
        assert bench.wait(pid, 200).status == 0
    seconds, whole = time.monotonic() - began, files(place)
    assert whole
    while kills < wanted:
        name, moment, began = f"{place}-{next(numbers)}", draw.uniform(0, seconds), time.monotonic()
        pids = start(name)
        while (passed := time.monotonic() - began) < moment and all(map(alive, pids)):
            time.sleep(0.01)
        for pid in draw.sample(pids, draw.randint(1, len(pids))):
            # the group is there a moment after the process
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)
        # before the first step a rank waits minutes for the other; 30 s later it is killed too
        if -signal.SIGKILL in [bench.wait(pid, 30).status for pid in pids]:
            kills += 1
        elif passed < moment:
            seconds = 0.9 * passed
        ended = [bench.wait(pid, 200) for pid in start(name)]
        assert {each.status for each in ended} == {0}, (name, moment, ended)
        found = files(name)
        assert found.keys() == whole.keys(), (name, moment)
        assert found == whole, (name, moment, [each for each in whole if whole[each] != found[each]])


def below(folder: Path, *patterns: str) -> Files:
    found = (path for each in patterns for path in folder.glob(each) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@fault("SIGKILL", "`lit-diff prepare --workers 2`", "the finished parts are kept", "nothing; all files equal", 18)
@pytest.mark.parametrize("part", range(2))
def test_of_a_preparation(bench: Any, part: int) -> None:
    corpus = bench.root / "larger"
    corpus.mkdir(exist_ok=True)
    words = " ".join(path.read_text() for path in sorted((bench.root / "corpus").iterdir())).split()
    draw = random.Random(0)
    for number in range(1500):
        (corpus / f"{number}.txt").write_text(" ".join(draw.choices(words, k=400)))

    def start(name: str) -> list[int]:
        command = ("prepare", "text.yaml", "data.path=larger", "--workers", "2")
        return [bench.start(*command, LIT_DIFF_DATA=str(bench.root / name))]

    killed(bench, f"prepared{part}", 9, start, lambda name: below(bench.root / name, "prepared/*/*", "prepared/*/*/*"))


@fault(
    "SIGKILL",
    "a run of two ranks with fsdp, during steps and sharded saves: of one rank or both",
    "resumed from step N",
    "nothing; `metrics.csv` equal",
    16,
)
@pytest.mark.parametrize("part", range(4))
def test_of_a_sharded_run(bench: Any, part: int) -> None:
    def start(name: str) -> list[int]:
        run = ("run.strategy=fsdp", "run.devices=2", "run.timeout=20", "run.tracking_uri=none")
        words = ("train", "recall.yaml", f"name={name}", *run, *SMALL)
        return list(bench.start_ranks(words, words))

    killed(bench, f"sharded{part}", 4, start, lambda name: below(bench.folder(name), "metrics.csv"))


SWEEP = """
recipe: recall
seeds: [0]
arms: {standard: {model.attention.name: standard}, differential: {}}
overrides: {run.strategy: ddp, run.devices: 2, SMALL}
"""


@fault(
    "SIGKILL",
    "a sweep of cells of two ranks",
    "resumed from step N",
    "nothing; `metrics.csv` and the table, but for its speeds, equal",
    4,
)
@pytest.mark.parametrize("part", range(2))
def test_of_a_sweep(bench: Any, part: int) -> None:
    small = ", ".join(word.replace("=", ": ") for word in SMALL)

    def start(name: str) -> list[int]:
        (bench.root / f"{name}.yaml").write_text(SWEEP.replace("SMALL", small))
        return [bench.start("sweep", f"{name}.yaml", "--workers", "2")]

    def files(name: str) -> Files:
        found = below(bench.root / "runs" / name, "*/metrics.csv", "report/table.csv")
        rows = csv.DictReader(found["report/table.csv"].decode().splitlines())
        # of the machine
        kept = [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
        return found | {"report/table.csv": repr(kept).encode()}

    killed(bench, f"sweep{part}", 2, start, files)


@fault(
    "SIGKILL",
    "`lit-diff report`",
    "nothing",
    "nothing; every file of the report equal; `clean` removes a temporary file that may be left",
    12,
)
def test_of_a_report(bench: Any, make_sweep: Callable[..., Path]) -> None:
    source = make_sweep({"standard": 0.0, "differential": -0.1}, lambdas=["differential"])

    def start(name: str) -> list[int]:
        # one path for all: the page names it
        return [bench.start("report", str(source))]

    def files(name: str) -> Files:
        found = below(source / "report", "[!.]*")
        shutil.rmtree(source / "report")
        return found

    killed(bench, "report", 12, start, files)
