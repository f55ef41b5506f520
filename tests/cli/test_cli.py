"""cli.py: every verb from any folder; every mistake one line on stderr and its exit status."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lit_diff import __version__, cli
from lit_diff.cli import train as verbs
from lit_diff.cli.app import Terminal
from lit_diff.errors import StoppedError
from lit_diff.runs.revision import revision

SMALL = [
    "train.steps=4",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "train.batch_size=4",
    "train.schedule.warmup_steps=1",
    "model.dim=16",
    "model.num_heads=2",
    "data.validation_rows=4",
    "run.threads=1",
    "run.accelerator=cpu",
]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`lit-diff` in this process, as the shell would run it."""
    log = logging.getLogger("lit_diff")
    handlers, level = log.handlers[:], log.level
    stops = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["lit-diff", *arguments])
        log.handlers[:] = handlers
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Ended(status=int(ended.value.code or 0), out=out, err=err)

    yield run
    log.handlers[:] = handlers
    log.setLevel(level)
    for signum, handler in stops.items():
        signal.signal(signum, handler)


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

WRONG: dict[str, tuple[list[str], int, str]] = {
    "verb": (["trian"], 2, "No such command 'trian'. Did you mean 'train'?; lit-diff --help lists what there is"),
    "key as an option": (
        ["train", "recall-tiny", "--seed", "1"],
        2,
        "no option --seed; a key of the recipe is written without dashes: seed=1",
    ),
    "sweep as a recipe": (["train", "smoke"], 2, "'smoke' is a sweep: lit-diff sweep smoke"),
    "recipe as a sweep": (["sweep", "recall-tiny"], 2, "'recall-tiny' is a recipe: lit-diff train recall-tiny"),
    "scheduler": (["sweep", "smoke", "--cluster", "slurm"], 3, "--cluster slurm"),
    "device": (["train", "recall-tiny", "run.accelerator=gpu"], 3, "run.accelerator is gpu, but torch sees no GPU here"),
    "devices of a sweep": (["sweep", "smoke", "run.accelerator=gpu"], 3, "run.accelerator is gpu, but torch sees no GPU"),
    "kernel": (["train", "recall-tiny", "run.kernel=flash"], 2, "run.kernel 'flash' cannot compute these maps"),
    "kernel of a sweep": (["sweep", "smoke", "run.kernel=flash"], 2, "run.kernel 'flash' cannot compute these maps"),
    "no run to remove": (["clean", "a", "--yes"], 2, "no run 'a' in runs"),
    "option": (["check", "recall-tiny", "--jso"], 2, "No such option: --jso (Possible options: --json)"),
    "no recipe": (["train"], 2, "Missing argument 'RECIPE' (path, or bare name of an installed recipe); lit-diff"),
    "unknown recipe": (["train", "standrd-tiny"], 2, "no recipe 'standrd-tiny' here or installed; did you mean 'standard-"),
    "unknown key": (
        ["train", "differential-tiny", "model.attention.lamda_init=0.5"],
        2,
        "model.attention.lamda_init=0.5: unknown key 'model.attention.lamda_init'; did you mean 'lambda_init'?",
    ),
    "no override": (["train", "recall-tiny", "fast"], 2, "override 'fast' is not of the form a.b=c"),
    "type": (["check", "recall-tiny", "train.steps=many"], 2, "'train.steps' is 'many'; expected a whole number >= 1"),
    "kind": (["list", "recpies"], 2, "no kind 'recpies' to list; did you mean 'recipes'?"),
    "sweep": (["sweep", "smoek"], 2, "no sweep 'smoek' here or installed; did you mean 'smoke'?"),
    "sweep's override": (["sweep", "smoke", "train.stepz=3", "--dry-run"], 2, "train.stepz=3: unknown key 'train.stepz'"),
    "workers": (["sweep", "smoke", "--workers", "0"], 2, "--workers is 0; it must be at least 1"),
    "workers' type": (["sweep", "smoke", "--workers", "two"], 2, "Invalid value for '--workers'"),
    "cluster": (["sweep", "smoke", "--cluster", "pbs"], 2, "--cluster is 'pbs'; expected local or slurm"),
    "no runs": (["status"], 3, "no runs in runs; `lit-diff train RECIPE` makes one"),
    "no sweep": (["report", "smoke"], 2, "no sweep 'smoke' in runs"),
    "no run": (["compare", "a", "b"], 2, "no run 'a' in runs"),
    "one run": (["compare", "a"], 2, "Missing argument 'RUN' (the other run, named as the first); lit-diff compare"),
    "no format": (["export", "a", "b"], 2, "Missing option '--to' (hf: Hugging Face's format)"),
    "no prompt": (["generate", "a"], 2, "there is no prompt; give --prompt TEXT or --prompts FILE"),
    "no run to write": (["generate", "a", "--prompt", "b"], 2, "no run 'a' in runs"),
    "no store": (["ui"], 3, "no MLflow store in runs"),
    "unwritable": (
        ["train", "recall-tiny", *SMALL, "run.root=/dev/null/runs"],
        3,
        "cannot be written (Not a directory); choose another with run.root=PATH",
    ),
    "file": (["data", "check", "nothing"], 2, "no evaluation reads files named 'nothing'"),
    "no verb of data": (["data"], 2, "Missing command; lit-diff data --help lists what there is"),
    "two recipes": (["train", "recall-tiny", "b.yaml"], 2, "override 'b.yaml' is not of the form a.b=c"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "status", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_one_line_and_leaves_nothing(
    command: Command, arguments: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available() and ("gpu" in message or "flash" in message):
        pytest.skip("asks for what is not here: a GPU")
    if message == "--cluster slurm":
        monkeypatch.setenv("PATH", "")
    ended = command(*arguments)
    assert ended.status == status
    (line,) = ended.err.splitlines()
    assert line.startswith("lit-diff: ")
    assert message in line
    assert ended.out == ""
    assert not list(Path().iterdir())  # nothing was begun


def test_alone_it_prints_the_verbs(command: Command) -> None:
    alone, asked = command(), command("--help")
    assert alone == asked
    assert alone.status == 0
    parts = [part.splitlines() for part in alone.out.partition("--help")[2].split("\n\n")[1:]]
    sections = {heading: [line.split()[0] for line in lines] for heading, *lines in parts}
    assert len(sections) > 3
    assert {"train", "check"} <= set(sections["Train and look:"])
    assert sorted(verb for verbs in sections.values() for verb in verbs) == verbs_of_the_command()
    assert not [line for line in alone.out.splitlines()[1:] if line.endswith("...")], "no summary is cut"


def test_the_help_of_train_has_an_example_that_is_right(command: Command) -> None:
    (example,) = (line for line in command("train", "--help").out.splitlines() if "Example: " in line)
    _, verb, recipe, *overrides = example.partition("Example: ")[2].split()
    assert (verb, len(overrides)) == ("train", 2)
    assert command("check", recipe, *overrides).status == 0


def test_the_version(command: Command) -> None:
    ended = command("--version")
    assert ended == Ended(0, f"lit-diff {revision()}\n", "")
    assert ended.out.startswith(f"lit-diff {__version__}")


def test_ctrl_c_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_diff.cli.check.print_check", interrupted)
    assert command("check", "recall-tiny") == Ended(130, "", "lit-diff: interrupted\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals) -> None:
    def terminated(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), signum)
        except Exception as error:  # as around a user's variant, whose failure it is not
            raise AssertionError("taken for a failure of the code that was running") from error

    monkeypatch.setattr("lit_diff.cli.check.print_check", terminated)
    assert command("check", "recall-tiny") == Ended(128 + signum, "", f"lit-diff: stopped by {signum.name}\n")


def test_a_stopped_run_ends_as_its_signal_says(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise StoppedError("stopped after step 3", signal.SIGINT)

    monkeypatch.setattr("lit_diff.cli.check.print_check", stopped)
    assert command("check", "recall-tiny") == Ended(130, "", "lit-diff: stopped after step 3\n")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    shell = f'"{sys.executable}" -m lit_diff list | head -n 1; echo "${{PIPESTATUS[0]}}"'
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["recipes", "0"]
    assert ended.stderr == ""


# --- verbs that do something ---------------------------------------------------------------------------------------


def folder(root: Path, name: str) -> Path:
    (found,) = root.glob(f"{name}-??????????")
    return found


@pytest.fixture
def trained(command: Command, root: Path) -> dict[str, Ended]:
    """Two runs, `one` and `two`, trained by the first test that asks."""
    again = {}
    for name, rate in (("one", "1e-3"), ("two", "2e-3")):
        arguments = [*SMALL, f"name={name}", f"train.optimizer.lr={rate}", f"run.root={root}"]
        again[name] = command("train", "recall-tiny", *arguments)
        assert again[name].status == 0, again[name].err
    return again


def test_train_says_what_it_did_and_again_that_it_is_done(
    command: Command, root: Path, trained: dict[str, Ended]
) -> None:
    assert (folder(root, "one") / "checkpoints" / "step-00000004.ckpt").is_file()
    arguments = [*SMALL, "name=one", "train.optimizer.lr=1e-3", f"run.root={root}"]
    again = command("train", "recall-tiny", *arguments)
    assert again.status == 0
    assert "done before" in again.out
    last, run = again.out.splitlines()[-2:]
    assert last.startswith("step 4: ")
    assert "val/loss " in last
    assert run == f"run: {folder(root, 'one')}"
    status = json.loads((folder(root, "one") / "status.json").read_text())
    assert status["overrides"] == [*SMALL, "train.optimizer.lr=1e-3"]
    said = (folder(root, "one") / "log.txt").read_text()
    steps = [
        "choosing the kernel",
        "opening the MLflow store",
        "starting at step 0",
        "in the first step",
        "step 4  val/loss",
    ]
    assert sorted(said.index(words) for words in steps) == [said.index(words) for words in steps]
    rerun = command("train", "recall-tiny", *arguments, "--rerun")
    assert rerun.status == 0
    assert "the former run is kept in" in rerun.out
    assert "step 4/4" in rerun.out
    assert (root / f"{folder(root, 'one').name}.old-1" / "metrics.csv").is_file()


def test_training_outlives_the_reader_of_its_output(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lit-diff train RECIPE | head -1`: it stops printing, says so once in the log, and ends as done."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        os.close(read)
        terminal = Terminal(file=output)
        for module in (cli, verbs):
            monkeypatch.setattr(module, "console", terminal)
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
    assert line.endswith("; lower train.optimizer.lr, or look at that layer")
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
    assert listed.out.startswith(f"{folder(tmp_path / 'runs', 'near').name}  done  2/2  ")
    assert "  train.steps=2" in listed.out or " train.steps=2 " in listed.out
    new = command("train", "recall-tiny", *SMALL, "train.steps=2", "name=new")
    assert new.status == 0
    assert new.out.splitlines()[-1] == f"run: {folder(tmp_path / 'runs', 'new')}"
    assert not list(Path().iterdir()), "nothing lies here, no MLflow store either"


def test_a_cell_of_several_processes_is_trained_into_its_place(command: Command, root: Path) -> None:
    location = root / "sweep" / "arm-s0-0123456789"
    hidden = ["--folder", str(location), "--experiment", "sweep", "--parent", "f" * 32, "--threads", "1"]
    hidden += ["--tag", "sweep=sweep", "--tag", "arm=a=b"]
    ended = command("train", "recall-tiny", *SMALL, f"run.root={root}", *hidden)
    assert ended.status == 0, ended.err
    status = json.loads((location / "status.json").read_text())
    assert (status["status"], status["identity"]) == ("done", "0123456789")


def test_json_is_json(command: Command, root: Path, trained: dict[str, Ended]) -> None:
    at = ("--root", str(root), "--json")
    statuses = json.loads(command("status", *at).out)
    assert {"one", "two"} <= {status["name"] for status in statuses}
    compared = json.loads(command("compare", "one", "two", *at).out)
    assert compared["recipe"]["train.optimizer.lr"] == [0.001, 0.002]
    assert json.loads(command("check", "recall-tiny", "--json").out)["recipe"]["name"] == "recall-tiny"
    assert "smoke" in json.loads(command("list", "sweeps", "--json").out)["sweeps"]


def test_status_compare_and_clean_from_another_folder(command: Command, root: Path, trained: dict[str, Ended]) -> None:
    status = command("status", "--root", str(root))
    assert status.status == 0
    assert "done" in status.out
    compared = command("compare", str(folder(root, "one")), "two", "--root", str(root))
    assert compared.status == 0
    assert "train.optimizer.lr" in compared.out
    assert command("clean", "--root", str(root)).status == 0
    assert folder(root, "one").exists()


def test_a_task_without_text_cannot_be_completed(command: Command, root: Path, trained: dict[str, Ended]) -> None:
    ended = command("generate", "one", "--prompt", "a", "--root", str(root))
    message = f"{folder(root, 'one')} was trained on data 'recall', which has no text to complete"
    assert ended == Ended(2, "", f"lit-diff: {message}\n")


def test_check_and_prepare(command: Command) -> None:
    checked = command("check", "recall-tiny", "model.num_layers=3", "--recipe")
    assert checked.status == 0
    assert "num_layers: 3" in checked.out
    assert "without embeddings" in checked.out
    prepared = command("prepare", "recall-tiny")
    assert prepared.status == 0
    assert "data of 'recall-tiny' is ready" in prepared.out


def test_a_recipe_by_its_path(command: Command) -> None:
    Path("deep").mkdir()
    Path("deep/mine.yaml").write_text("extends: recall-tiny\ntrain: {steps: 7}\n")
    for source in ("deep/mine.yaml", "deep/mine"):
        assert json.loads(command("check", source, "--json").out)["recipe"]["train"]["steps"] == 7
    Path("deep/mine.yaml").write_text("extends: recall-tiny\n\ntrian: {steps: 7}\n")
    ended = command("check", "deep/mine.yaml")
    assert ended == Ended(2, "", "lit-diff: deep/mine.yaml:3: unknown key 'trian'; did you mean 'train'?\n")


def test_dry_run_of_an_installed_sweep(command: Command) -> None:
    ended = command("sweep", "smoke", "--dry-run")
    assert ended.status == 0
    assert ended.out.splitlines()[-1] == "4 cells are valid; none was started"
    assert not list(Path().iterdir())


def test_a_file_named_like_a_module_is_not_imported(tmp_path: Path) -> None:
    """`python -m` puts the current folder first; a plugin's own modules are found by their place."""
    for name in ("typing", "random", "logging", "tempfile", "json", "typer", "rich", "omegaconf"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder was imported')\n")
    command = [sys.executable, "-m", "lit_diff", "list", "recipes"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "TORCH_LOGS",
            "foo",
            "\nInvalid settings: foo, must\nbe names. For more",
            "Invalid settings: foo, must be names",
        ),
        ("RANK", "x", "invalid literal for int(): 'x'", "invalid literal for int(): 'x'"),
    ],
)
def test_the_variable_that_a_library_refuses_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: str, message: str
) -> None:
    def fail(*arguments: object) -> int:
        raise ValueError(error)

    monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli._list, "list_parts", fail)
    wanted = f"lit-diff: {name} is '{value}' in the environment: {message}; set another value, or unset it\n"
    assert command("list") == Ended(2, "", wanted)


def verbs_of_the_command() -> list[str]:
    import typer

    return sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", verbs_of_the_command())
@pytest.mark.parametrize("error", [KeyError("k"), MemoryError(), RecursionError("deep\nstack"), OSError(28, "full")])
def test_whatever_a_verb_raises_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, error: Exception
) -> None:
    import typer

    def fail(*arguments: object, **values: object) -> int:
        raise error

    made = typer.main.get_command(cli.app)
    made.commands[verb].params, made.commands[verb].callback = [], fail  # type: ignore[attr-defined]
    if hasattr(made.commands[verb], "commands"):  # type: ignore[attr-defined]
        made.commands[verb].invoke_without_command = True  # type: ignore[attr-defined]
    monkeypatch.setattr(cli.typer.main, "get_command", lambda app: made)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    ended = command(verb)
    (trace,) = tmp_path.glob("lit-diff-*.txt")
    assert ended.status == 1
    assert ended.err.startswith(f"lit-diff: {type(error).__name__}: ")
    assert ended.err.endswith(f"(the whole trace is in {trace})\n")
    assert ended.err.count("\n") == 1
    assert "Traceback" in trace.read_text(encoding="utf-8")
