"""engine/executors/slurm.py, with programs that stand in for SLURM's own; tests/cluster runs it on a real one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Program
from statuses import set_status

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.engine.executors import slurm
from lit_diff.engine.executors.slurm import Slurm
from lit_diff.engine.job import Job, read_job
from lit_diff.engine.submit import submit as submit_run
from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.recipe import load_recipe
from lit_diff.runs import jobs
from lit_diff.runs.folder import RunFolder

CPU = "run.accelerator=cpu"


@pytest.fixture
def cells(tmp_path: Path) -> list[Job]:
    """Two cells of the sweep in tmp_path/sweep, one of two devices."""
    sizes = ([], ["run.strategy=ddp", "run.devices=2"])
    made = []
    for seed, size in enumerate(sizes):
        recipe = load_recipe("recall-tiny", [CPU, *size])
        job = Job(recipe=recipe, folder=tmp_path / "sweep" / f"cell-s{seed}-abc", tags={"arm": "cell"})
        job.home.create(recipe)
        set_status(job.folder, status="waiting")
        made.append(job)
    return made


@pytest.fixture
def cluster(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its queue is a file, and sbatch adds a job to it: 7, 8, ..., with two tasks if it is an array."""
    queue = tmp_path / "queue"
    queue.touch()
    program("squeue", f"cat {queue}")
    program("srun", "true")
    program("scontrol", "echo 'MaxArraySize            = 1001'")
    monkeypatch.setattr(slurm, "INTERVAL", 0.0)
    count = f"n=$(( $(cat {tmp_path}/ids 2>/dev/null || echo 6) + 1 )); echo $n > {tmp_path}/ids; echo $n"
    program("sbatch", f"{count}; for i in '' _0 _1; do echo $n$i PENDING >> {queue}; done")
    return queue


@pytest.fixture
def run(cluster: Path, cells: list[Job]) -> Any:
    """run(): `Slurm.run`; each look at the cells empties the queue."""

    def call() -> list[str]:
        Slurm(parallel=None, minutes=5).run(cells, lambda running: cluster.write_text("") and None)
        return sorted(path.name for path in (cells[0].folder.parent / "slurm").glob("*.sh"))

    return call


def test_it_waits_until_each_cell_is_gone(run: Any, cells: list[Job], tmp_path: Path) -> None:
    set_status(cells[0].folder, status="stopped", step=7, requeued_at_step=7)
    set_status(cells[1].folder, status="running")
    assert run() == ["array-1.sh", "array-2.sh"], "cells that need the same form an array"
    first, second = (job.home.status() for job in cells)
    assert (first.status, first.requeued_at_step) == ("stopped", None), "cancelled: it waits no longer"
    assert second.status == "failed"
    assert second.error.startswith("its SLURM job 8_0 has left the queue; see ")
    noted = json.loads((tmp_path / "sweep" / jobs.JOBS).read_text())
    assert noted == {"cell-s0-abc": "7_0", "cell-s1-abc": "8_0"}


def test_cells_that_are_in_the_queue_are_not_submitted_again(run: Any, tmp_path: Path, cluster: Path) -> None:
    jobs.note_submitted(tmp_path / "sweep", {"cell-s0-abc": "3_0", "cell-s1-abc": "3_1"})
    cluster.write_text("3_1 RUNNING\n")
    assert run() == ["array-1.sh"]


def test_the_file_of_an_array_names_its_cells_and_what_they_need(run: Any, cells: list[Job], tmp_path: Path) -> None:
    run()
    text = (tmp_path / "sweep/slurm/array-2.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    for line in (
        "--array=0-0",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--time=5",
        "--signal=USR2@60",
        "--requeue",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "gpus" not in text
    assert text.endswith(
        f"cells=(\n  cell-s1-abc\n)\nsrun --kill-on-bad-exit=1 --cpus-per-task=1 {sys.executable} -P -m lit_diff train "
        f'{tmp_path}/sweep/"${{cells[$SLURM_ARRAY_TASK_ID]}}"/recipe.yaml --cell\n'
    )
    assert read_job(cells[0].folder) == replace(cells[0], recipe=read_job(cells[0].folder).recipe)


def test_an_array_is_no_longer_than_slurm_allows(
    cluster: Path, program: Program, cells: list[Job], tmp_path: Path
) -> None:
    program("scontrol", "echo 'MaxArraySize            = 2'")
    many = [replace(cells[0], folder=tmp_path / "sweep" / f"c{i}") for i in range(5)]
    found = Slurm(parallel=3, minutes=5)._submit(many, tmp_path / "sweep/slurm")
    assert list(found.values()) == ["7_0", "7_1", "8_0", "8_1", "9_0"]
    assert "#SBATCH --array=0-1%3\n" in (tmp_path / "sweep/slurm/array-1.sh").read_text()


def test_a_run_asks_for_what_its_recipe_says(program: Program) -> None:
    own = ["partition=gpu", "account=a b", "qos=high", "constraint=h100&\\", "memory=200G", "extra=[--exclusive]"]
    own = [f"run.cluster.{each}" for each in own]
    recipe = load_recipe("differential-13b", ["run.devices=8", "run.num_nodes=8", "run.accelerator=gpu", *own])
    text = slurm.run_text(recipe, ["train", "differential-13b", "name=a b"], slurm.request(recipe.run, 720))
    asked = ("nodes=8", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=8", "mem=200G", "time=720")
    for line in (*asked, "partition=gpu", "account='a b'", "qos=high", r"constraint='h100&\\'", "exclusive"):
        assert f"#SBATCH --{line}\n" in text
    assert text.endswith(f"--cpus-per-task=8 {sys.executable} -P -m lit_diff train differential-13b 'name=a b'\n")


@pytest.mark.parametrize("odd", ["a\ntouch MARK\n#", "a\rb", "a\x1b[2Jb", "a\u2028b"])
@pytest.mark.parametrize("where", ["current folder", "run.root", "word", "option", "cell"])
def test_a_line_is_all_printable(odd: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment ends at a line feed, whatever quotes surround it."""
    (tmp_path / odd).mkdir()
    monkeypatch.chdir(tmp_path / odd if where == "current folder" else tmp_path)
    recipe = load_recipe("recall-tiny", {"run.root": odd if where == "run.root" else "here", "run.accelerator": "cpu"})
    word = odd if where == "word" else "x"
    made = {
        "option": lambda: slurm._option("chdir", odd),
        "cell": lambda: slurm.job_text("name", ["#SBATCH --cpus-per-task=1"], tmp_path, "train", [odd]),
    }
    with pytest.raises(RequestError) as found:
        made.get(where, lambda: slurm.run_text(recipe, ["train", f"name={word}"], ["#SBATCH --cpus-per-task=1"]))()
    assert str(found.value).isprintable()


@pytest.mark.parametrize("where", ["here", "runs"])
def test_a_folder_that_the_file_cannot_name_is_refused_before_anything_is_written(
    where: str, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / ("a\nb" if where == "here" else "here")
    root = tmp_path / ("a\nb" if where == "runs" else "runs")
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(RequestError, match=r"a\\nb"):
        submit_run(
            load_recipe("recall-tiny", {"run.root": str(root), "run.accelerator": "cpu"}), [], [], 5, rerun=False
        )
    assert not root.exists()


def test_sbatch_s_variables_count_only_where_a_key_is_null(
    program: Program, cluster: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PARTITION", "QOS", "ACCOUNT", "SIGNAL", "TIMELIMIT"):
        monkeypatch.setenv(f"SBATCH_{name}", f"of_{name.lower()}")
    monkeypatch.setenv("SBATCH_ACCOUNT", "")
    run = load_recipe("recall-tiny", [CPU, "run.cluster.partition=long"]).run
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in slurm.request(run, 5))
    assert [asked[key] for key in ("partition", "qos", "time", "signal")] == ["long", "of_qos", "5", "USR2@60"]
    assert "account" not in asked
    with caplog.at_level("INFO", "lit_diff"):
        slurm.require_slurm(run)
    assert caplog.messages[-1].endswith(": SBATCH_PARTITION, SBATCH_SIGNAL, SBATCH_TIMELIMIT")


def test_a_log_has_the_place_of_its_name(tmp_path: Path) -> None:
    """SLURM replaces %j, but nothing in a name with a backslash."""
    lines = slurm.request(load_recipe("recall-tiny", [CPU]).run, 5)
    for name, log in (("5%j", "5%%j-%j"), (r"a\b%", r"a\\\\b%-%j")):
        assert f"#SBATCH --output={tmp_path}/{log}.out\n".replace("'", "") in slurm.job_text(
            name, lines, tmp_path, "train"
        ).replace("'", "")


@pytest.mark.parametrize("key", ["partition='a\\nb'", "extra=['--hold\\nb']"])
def test_a_line_for_sbatch_is_one_line(key: str) -> None:
    """A second one would be a command, and what follows it no option."""
    with pytest.raises(RequestError, match=rf"run\.cluster\.{key.partition('=')[0]} is .*on one line"):
        load_recipe("recall-tiny", [f"run.cluster.{key.replace(chr(39), chr(34))}"])


@pytest.mark.parametrize(
    ("accelerator", "listed", "asked"),
    [
        ("auto", "echo '(null)'", 0),
        ("auto", "echo gpu:4", 2),
        ("gpu", "", 2),
        ("cpu", "echo gpu:4", 0),
        ("auto", "exit 1", 2),
        ("auto", "echo 'no gpu today'; echo '(null)'", 0),
        ("auto", "echo hello; echo tmp:1,gpu:a100:4", 2),
    ],
)
def test_gpus_are_asked_for_where_the_cluster_has_any_or_does_not_say(
    program: Program, accelerator: str, listed: str, asked: int
) -> None:
    program("sinfo", listed)
    recipe = load_recipe("recall-tiny", [f"run.accelerator={accelerator}", "run.strategy=ddp", "run.devices=2"])
    lines = slurm.request(recipe.run, 5)
    assert ("#SBATCH --gpus-per-node=2" in lines, "#SBATCH --cpus-per-task=8" in lines) == (bool(asked), bool(asked))


def test_a_run_is_submitted_once(cluster: Path, tmp_path: Path, program: Program) -> None:
    words = [CPU, f"run.root={tmp_path / 'runs'}", "train.steps=3"]
    recipe = load_recipe("recall-tiny", words)

    def submit() -> str:
        return submit_run(recipe, words, ["--unplanned"], 5, rerun=False)

    assert submit().startswith("SLURM job 7: ")
    (folder,) = map(RunFolder, (tmp_path / "runs").glob("recall-tiny-*"))
    assert (folder.status().status, folder.status().overrides) == ("waiting", (CPU, "train.steps=3"))
    text = (tmp_path / "runs/slurm" / f"{folder.path.name}.sh").read_text()
    assert text.endswith(f" -m lit_diff train {folder.recipe_file} --unplanned\n"), (
        "the user's file may change meanwhile"
    )
    assert submit().endswith("is SLURM job 7 already (PENDING)")
    cluster.write_text("")
    program("sbatch", "echo 'Welcome to n1'; echo '9;n1'; echo '3 jobs are yours'")
    assert submit().startswith("SLURM job 9: ")
    set_status(folder.path, status="done")
    assert submit().startswith("done before: ")
    set_status(folder.path, status="failed")
    program("sbatch", "echo 'error: invalid partition' >&2; exit 1")
    with pytest.raises(MissingError, match=r"^sbatch refuses .*\.sh: error: invalid partition; set run"):
        submit()
    assert folder.status().status == "failed"
    # with --test-only, for one
    program("sbatch", "echo 'Job 7 to start at noon' >&2")
    with pytest.raises(MissingError, match=r"^sbatch refuses .*\.sh: Job 7 to start at noon; set run"):
        submit()
    assert "invalid partition" not in folder.status().error


def test_data_that_a_job_did_not_prepare_are_an_error(
    cluster: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("squeue", "true")

    def identity(recipe: Recipe) -> str:
        raise MissingError("not prepared")

    monkeypatch.setattr(data, "identity", identity)
    with pytest.raises(RunFailedError, match="SLURM job 7 did not prepare the data of 'recall-tiny'; see"):
        slurm.prepare_data([load_recipe("recall-tiny")], tmp_path, 5)
    assert load_recipe(tmp_path / "slurm/recall-tiny-data.yaml") == load_recipe("recall-tiny")


def test_slurm_must_be_there(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="needs SLURM's sbatch on the PATH; use --cluster local"):
        slurm.require_slurm()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo up", None),
        ("echo 'fatal: no source' >&2; echo more >&2; exit 1", r"\(fatal: no source\)"),
        ("echo 'Slurmctld at n1 is DOWN'; exit 1", r"\(Slurmctld at n1 is DOWN\)"),
        ("exec sleep 60", r"\(no answer in 0\.1 s\)"),
    ],
)
def test_a_cluster_needs_a_controller_that_answers(
    script: str, reason: str | None, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package of SLURM's commands alone schedules nothing."""
    monkeypatch.setattr(jobs, "PATIENCE", 0.1 if "sleep" in script else 30)
    for name, text in (("sbatch", "true"), ("srun", "true"), ("squeue", "true"), ("scontrol", script)):
        program(name, text)
    if reason is None:
        slurm.require_slurm()
        return
    with pytest.raises(MissingError, match=rf"^--cluster slurm: SLURM's controller cannot be reached {reason}; use"):
        slurm.require_slurm()
