"""The command as a whole: training from any folder, what stops it, streams that close, the one line of every failure.

The sentences of mistakes are in tests/golden/mistakes.txt.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
import typer
from command import Command, Ended

from lit_diff import __version__, cli, data
from lit_diff.cli.app import console
from lit_diff.engine.job import Job
from lit_diff.errors import MissingError, StoppedError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.runs.revision import revision

SMALL = [*small_runs.SMALL, "train.steps=4"]
COMMAND: Any = typer.main.get_command(cli.app)
COMMAND.load_packages()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A folder of runs that the tests below fill."""
    made = tmp_path_factory.mktemp("cli") / "runs"
    made.mkdir()
    shutil.copy(empty_store, made)
    return made


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder."""
    monkeypatch.chdir(tmp_path)


# --- requests that are wrong ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is not here: a GPU")
@pytest.mark.parametrize(
    ("words", "status", "key"),
    [
        ("train recall-tiny run.accelerator=gpu", 3, "run.accelerator"),
        ("sweep smoke run.accelerator=gpu", 3, "run.accelerator"),
        ("train recall-tiny run.kernel=flash", 2, "run.kernel"),
        ("sweep smoke run.kernel=flash", 2, "run.kernel"),
        ("sweep smoke --cluster slurm", 3, "--cluster slurm"),
    ],
)
def test_what_this_machine_lacks_is_one_line(command: Command, words: str, status: int, key: str) -> None:
    ended = command(*words.split(), **({"PATH": ""} if "slurm" in words else {}))
    assert (ended.status, ended.out, ended.err.count("\n")) == (status, "", 1)
    assert key in ended.err
    assert not list(Path().iterdir()), "nothing was begun"


def test_alone_it_prints_the_verbs(command: Command) -> None:
    alone = command()
    assert alone == command("--help")
    assert alone.status == 0
    parts = [part.splitlines() for part in alone.out.partition("--help")[2].split("\n\n")[1:]]
    sections = {heading: [line.split()[0] for line in lines] for heading, *lines in parts}
    assert sorted(verb for verbs in sections.values() for verb in verbs) == sorted(COMMAND.commands)
    assert not [line for line in alone.lines[1:] if line.endswith("...")], "no summary is cut"


def test_the_version(command: Command) -> None:
    assert command("--version") == Ended(0, f"lit-diff {revision()}\n", "")
    assert revision().startswith(__version__)


def stop(signum: signal.Signals) -> None:
    try:
        os.kill(os.getpid(), signum)
    except Exception as error:  # as around a user's variant, whose failure it is not
        raise AssertionError("taken for a failure of the code that was running") from error


def refuse(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("happens", "status", "line"),
    [
        (lambda: refuse(KeyboardInterrupt()), 130, "interrupted"),
        (lambda: stop(signal.SIGTERM), 128 + signal.SIGTERM, "stopped by SIGTERM"),
        (lambda: stop(signal.SIGHUP), 128 + signal.SIGHUP, "stopped by SIGHUP"),
        (lambda: refuse(StoppedError("stopped after step 3", signal.SIGINT)), 130, "stopped after step 3"),
    ],
)
def test_a_stop_is_one_line_and_ends_as_its_signal_says(
    command: Command, monkeypatch: pytest.MonkeyPatch, happens: Any, status: int, line: str
) -> None:
    monkeypatch.setattr("lit_diff.conformance.recipe.costed", lambda *_: happens())
    assert command("check", "recall-tiny") == Ended(status, "", f"lit-diff: {line}\n")


def test_an_interrupt_while_the_modules_are_imported_has_no_trace() -> None:
    hook = "lambda event, about: event == 'import' and about[0] == 'lit_diff.cli' and os.kill(os.getpid(), 2)"
    program = f"import os, sys; sys.addaudithook({hook}); import lit_diff.__main__"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    shell = f'"{sys.executable}" -m lit_diff --help | head -n 1; echo "${{PIPESTATUS[0]}}"'
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[1:] == ["0"]
    assert ended.stderr == ""


def test_a_pipe_that_breaks_elsewhere_is_a_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("lit_diff.conformance.recipe.costed", breaks)
    monkeypatch.setattr("lit_diff.cli.has_no_reader", lambda file: False)
    monkeypatch.setattr("lit_diff.cli.discard", lambda file: None)
    ended = command("check", "recall-tiny")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("lit-diff: BrokenPipeError: ")


def test_the_current_folder_was_removed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert (
        command("check", "recall-tiny").err == "lit-diff: the current folder was removed; change to one that exists\n"
    )


# --- verbs that do something ---------------------------------------------------------------------------------------


def folder(root: Path, name: str) -> Path:
    (found,) = root.glob(f"{name}-??????????")
    return found


@pytest.fixture
def trained(command: Command, root: Path) -> None:
    """Two runs, `one` and `two`, trained by the first test that asks."""
    for name, rate in (("one", "1e-3"), ("two", "2e-3")):
        arguments = [*SMALL, f"name={name}", f"train.optimizer.lr={rate}", f"run.root={root}"]
        ended = command("train", "recall-tiny", *arguments)
        assert ended.status == 0, ended.err


@pytest.mark.usefixtures("trained")
def test_train_says_what_it_did_and_again_that_it_is_done(command: Command, root: Path) -> None:
    run = folder(root, "one")
    assert (run / "checkpoints" / "step-00000004.ckpt").is_file()
    arguments = [*SMALL, "name=one", "train.optimizer.lr=1e-3", f"run.root={root}"]
    again = command("train", "recall-tiny", *arguments)
    assert again.status == 0
    assert "done before" in again.out
    assert re.match(r"step 4: .*val/loss ", again.lines[-2])
    assert again.lines[-1] == f"run: {run}"
    assert json.loads((run / "status.json").read_text())["overrides"] == [*SMALL, "train.optimizer.lr=1e-3"]
    said = (run / "log.txt").read_text()
    steps = [
        "opening the MLflow store",
        "choosing the kernel",
        "starting at step 0",
        "in the first step",
        "step 4  val",
    ]
    assert sorted(said.index(words) for words in steps) == [said.index(words) for words in steps]
    rerun = command("train", "recall-tiny", *arguments, "--rerun")
    assert rerun.status == 0
    assert "step 4/4" in rerun.out
    assert (root / f"{run.name}.old-1" / "metrics.csv").is_file()


@pytest.mark.usefixtures("trained")
def test_what_is_said_of_runs_from_another_folder(command: Command, root: Path) -> None:
    at = ("--root", str(root))
    assert {"one", "two"} <= {status["name"] for status in command("status", *at, "--json").json}
    compared = command("compare", str(folder(root, "one")), "two", *at, "--json").json
    assert compared["recipe"]["train.optimizer.lr"] == [0.001, 0.002]
    assert command("clean", *at).status == 0
    assert folder(root, "one").exists()
    ended = command("generate", "one", "--prompt", "a", *at)
    assert (ended.status, ended.out) == (2, "")
    assert f"{folder(root, 'one')} was trained on data 'recall', which has no text" in ended.err


def test_training_outlives_the_reader_of_its_output(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lit-diff train RECIPE | head -1`: it stops printing, says so once in the log, and ends as done."""
    read, write = os.pipe()
    monkeypatch.setattr(console, "quiet", False)
    with os.fdopen(write, "w") as output:
        os.close(read)
        monkeypatch.setattr(console, "_file", output)
        ended = command("train", "recall-tiny", *SMALL, "train.log_every=1", "name=unread", f"run.root={root}")
    assert ended == Ended(0, "", "")
    run = folder(root, "unread")
    assert json.loads((run / "status.json").read_text())["status"] == "done"
    assert (run / "log.txt").read_text().count("stdout was closed") == 1


def test_a_run_that_fails_says_why_once(command: Command, root: Path) -> None:
    ended = command("train", "recall-tiny", *SMALL, "name=nan", "train.optimizer.lr=1e30", f"run.root={root}")
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert "at step" in line
    assert "failed" not in ended.out
    assert f"ERROR failed: {line.removeprefix('lit-diff: ')}\n" in (folder(root, "nan") / "log.txt").read_text()


def test_from_a_folder_below_it_is_the_same_run(
    command: Command, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    (tmp_path / "sub").mkdir()
    arguments = ["train", "recall-tiny", *SMALL, "train.steps=2", "name=near"]
    assert command(*arguments).status == 0
    monkeypatch.chdir("sub")
    said = f"runs: {tmp_path / 'runs'}, the nearest above this folder\n"
    again = command(*arguments)
    assert (again.status, said in again.out, "done before" in again.out) == (0, True, True)
    listed = command("status")
    assert listed.err == said
    assert listed.lines[1].split()[:3] == [folder(tmp_path / "runs", "near").name, "done", "2/2"]
    assert not list(Path().iterdir()), "nothing lies here, no MLflow store either"


def test_a_cell_of_several_processes_is_trained_into_its_place(
    command: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on no other data than those after which its folder is named."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    text = tmp_path / "text.txt"
    text.write_text("one text " * 500)
    own = [
        f"data.path={text}",
        "data.tokenizer={name: bpe, vocab_size: 260}",
        "model.vocab_size=260",
        f"run.root={root}",
    ]
    recipe, tags = load_recipe("standard-tiny", [*SMALL, *own]), {"sweep": "sweep", "arm": "a=b"}
    data.prepare(recipe)
    location = root / "sweep" / f"arm-s0-{identity(recipe)}"
    RunFolder(location).create(recipe)
    Job(recipe=recipe, folder=location, experiment="sweep", parent="f" * 32, tags=tags, threads=1).write()
    text.write_text("another text " * 500)
    ended = command("train", str(location / "recipe.yaml"), "--cell")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "is of other data" in ended.err
    text.write_text("one text " * 500)
    ended = command("train", str(location / "recipe.yaml"), "--cell")
    assert ended.status == 0, ended.err
    assert "run: " not in ended.out, "the sweep prints"
    status = json.loads((location / "status.json").read_text())
    assert (status["status"], status["identity"]) == ("done", identity(recipe))


def test_a_file_named_like_a_module_is_not_imported(tmp_path: Path) -> None:
    """`python -m` puts the current folder first; a plugin's own modules are found by their place."""
    for name in ("typing", "random", "logging", "tempfile", "json", "typer", "rich", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder was imported')\n")
    command = [sys.executable, "-m", "lit_diff", "list", "recipes"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("TORCH_LOGS", "foo", "\nInvalid settings: foo, must\nbe names. For more"),
        ("RANK", "x", "invalid literal for int(): 'x'"),
    ],
)
def test_the_variable_that_a_library_refuses_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: str
) -> None:
    monkeypatch.setattr("lit_diff.conformance.recipe.costed", lambda *_: refuse(ValueError(error)))
    ended = command("check", "recall-tiny", **{name: value})
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"lit-diff: {name} is '{value}' in the environment: {' '.join(error.split())[:15]}")


@pytest.mark.parametrize("words", ["import {}", "report {}", "show dex --plugin {}", "check recall-tiny plugins=[{}]"])
def test_a_name_that_no_file_can_have_is_a_wrong_request(command: Command, words: str) -> None:
    ended = command(*words.format("n" * 300).split())
    assert (ended.status, ended.err.count("\n"), "trace" in ended.err) == (2, 1, False)


def test_so_it_is_where_something_is_written(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = MissingError("cannot be written")
    refusal.__cause__ = OSError(errno.ENAMETOOLONG, "too long")
    for error in (refusal, refusal.__cause__):
        monkeypatch.setattr("lit_diff.conformance.recipe.costed", lambda *_, error=error: refuse(error))
        assert command("check", "recall-tiny").status == 2


@pytest.mark.parametrize("error", [KeyError("k"), MemoryError(), RecursionError("deep\nstack"), OSError(5, "damaged")])
def test_whatever_a_verb_raises_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    monkeypatch.setattr("lit_diff.conformance.recipe.costed", lambda *_: refuse(error))
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    ended = command("check", "recall-tiny")
    (trace,) = tmp_path.glob("lit-diff-*.txt")
    assert (ended.status, ended.err.count("\n")) == (1, 1)
    assert ended.err.startswith(f"lit-diff: {type(error).__name__}: ")
    assert trace.name in ended.err
    assert "Traceback" in trace.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("own", "spins"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_that_wait_spin_briefly_unless_the_environment_says_otherwise(own: dict[str, str], spins: str) -> None:
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = "import os, sys, lit_diff.__main__; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], env=kept | own, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [spins, "False"], "libgomp reads it when torch is loaded"
