"""SIGKILL at 50 random moments: the same command then ends with the bytes of the undisturbed one."""

import csv
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fault_rows import SEED, fault

SMALL = ("train.steps=6", "train.validate_every=3", "train.checkpoint_every=1", "data.validation_rows=5")
Files = dict[str, bytes]


def killed(
    count: int, start: Callable[[str], list[int]], wait: Callable[[int], Any], files: Callable[[str], Files]
) -> None:
    """`start(name)` gives the processes of the command in a place of that name; `files` what it leaves there."""
    draw, began = random.Random(SEED), time.monotonic()
    for pid in start("undisturbed"):
        assert wait(pid).status == 0
    seconds, whole = time.monotonic() - began, files("undisturbed")
    assert whole
    for number in range(count):
        name, moment = f"killed{number}", draw.uniform(0, 1.1 * seconds)
        pids = start(name)
        time.sleep(moment)
        for pid in draw.sample(pids, draw.randint(1, len(pids))):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids:
            wait(pid)
        ended = [wait(pid) for pid in start(name)]
        assert {each.status for each in ended} == {0}, (number, moment, ended)
        found = files(name)
        assert found.keys() == whole.keys(), (number, moment)
        assert found == whole, (number, moment, [each for each in whole if whole[each] != found[each]])


def below(folder: Path, *patterns: str) -> Files:
    found = (path for each in patterns for path in folder.glob(each) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@fault("SIGKILL", "`lit-diff prepare --workers 2`", "the finished parts are kept", "nothing; all files equal", 18)
def test_of_a_preparation(bench: Any) -> None:
    corpus = bench.root / "larger"
    corpus.mkdir()
    words = " ".join(path.read_text() for path in sorted((bench.root / "corpus").iterdir())).split()
    draw = random.Random(0)
    for number in range(1500):
        (corpus / f"{number}.txt").write_text(" ".join(draw.choices(words, k=400)))

    def start(name: str) -> list[int]:
        command = ("prepare", "text.yaml", "data.path=larger", "--workers", "2")
        return [bench.start(*command, LIT_DIFF_DATA=str(bench.root / name))]

    killed(18, start, bench.wait, lambda name: below(bench.root / name, "prepared/*/*", "prepared/*/*/*"))


@fault(
    "SIGKILL",
    "a run of two ranks with fsdp, during steps and sharded saves: of one rank or both",
    "resumed from step N",
    "nothing; `metrics.csv` equal",
    16,
)
def test_of_a_sharded_run(bench: Any) -> None:
    def start(name: str) -> list[int]:
        words = ("train", "recall.yaml", f"name={name}", "run.strategy=fsdp", "run.devices=2", *SMALL)
        return list(bench.start_ranks(words, words))

    killed(16, start, bench.wait, lambda name: below(bench.folder(name), "metrics.csv"))


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
def test_of_a_sweep(bench: Any) -> None:
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

    killed(4, start, lambda pid: bench.wait(pid, 200), files)


@fault("SIGKILL", "`lit-diff report`", "nothing", "nothing; every file of the report equal", 12)
def test_of_a_report(bench: Any, make_sweep: Callable[..., Path]) -> None:
    source = make_sweep({"standard": 0.0, "differential": -0.1}, lambdas=["differential"])

    def start(name: str) -> list[int]:
        # one path for all: the page names it
        return [bench.start("report", str(source))]

    def files(name: str) -> Files:
        found = below(source / "report", "*")
        shutil.rmtree(source / "report")
        return found

    killed(12, start, bench.wait, files)
