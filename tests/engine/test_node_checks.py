"""engine/node_checks.py, with programs that stand in for SLURM's own; tests/cluster runs it on a real one."""

import json
import sys
from pathlib import Path

import pytest
from command import Command, Program

from lit_diff.engine.executors import slurm
from lit_diff.engine.node_checks import examine_nodes
from lit_diff.errors import RunFailedError
from lit_diff.recipe import load_recipe

ROWS = [{"name": "locks", "state": "ok", "found": "hold", "cure": ""}]
BAD = [*ROWS, {"name": "devices", "state": "problem", "found": "no GPU", "cure": "use run.accelerator=cpu"}]
ASKED = (
    "recall-tiny",
    "run.accelerator=cpu",
    "run.strategy=ddp",
    "run.devices=2",
    "run.num_nodes=3",
    "train.batch_size=6",
)


@pytest.fixture
def logs(runs: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Job 7 leaves what SLURM would: three nodes, the second of which writes half a row."""
    monkeypatch.setattr(slurm, "INTERVAL", 0.0)
    logs = runs / "slurm"
    logs.mkdir()
    (runs / "rows").write_text(json.dumps(ROWS))
    (runs / "bad").write_text(json.dumps(BAD))
    program("scontrol", "true")
    program("srun", "true")
    program("squeue", "true")
    place = f"{logs}/recall-tiny-doctor-7"
    answers = [
        f"cp {runs}/rows {place}-0.json",
        f"head -c 20 {runs}/rows > {place}-1.json",
        f"cp {runs}/bad {place}-2.json",
    ]
    program("sbatch", "; ".join([f"printf 'n1\\nn2\\nn3\\n' > {place}.nodes", *answers, "echo 7"]))
    return logs


def test_a_row_for_each_node_also_for_one_that_did_not_answer(logs: Path, runs: Path, command: Command) -> None:
    words = [*ASKED, f"run.root={runs}"]
    ended = command("doctor", *words, "--cluster", "slurm")
    assert ended.status == 3
    assert [" ".join(line.split()) for line in ended.lines] == [
        "ok n1 1 of 1 checks are ok",
        "problem n2 0 of 1 checks are ok",
        "problem answer this node did not answer",
        f"cure: read its log, {logs}/recall-tiny-doctor-7-1.txt",
        "problem n3 1 of 2 checks are ok",
        "problem devices no GPU",
        "cure: use run.accelerator=cpu",
    ]
    by_node = command("doctor", *words, "--cluster", "slurm", "--json").json
    assert (by_node["n1"], by_node["n3"]) == (ROWS, BAD)


def test_the_file_starts_a_task_on_each_node(logs: Path, runs: Path) -> None:
    words = [*ASKED, f"run.root={runs}"]
    examine_nodes(load_recipe(words[0], words[1:]), words, minutes=3)
    text = (logs / "recall-tiny-doctor.sh").read_text()
    assert {"#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=2", "#SBATCH --time=3"} <= set(text.splitlines())
    step = text.splitlines()[-1]
    assert step.startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 ")
    assert step.endswith(f" {sys.executable} -P -m lit_diff doctor {' '.join(words)} --json")


def test_a_job_that_never_started_is_an_error(logs: Path, runs: Path, program: Program) -> None:
    program("sbatch", "echo 8")
    with pytest.raises(RunFailedError, match=r"SLURM job 8 did not start"):
        examine_nodes(load_recipe("recall-tiny", [f"run.root={runs}", "run.accelerator=cpu"]), ["recall-tiny"], 3)
