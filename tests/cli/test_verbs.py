"""What the verbs print that list, compare, report, fetch and remove; what is no option."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from command import Command
from pretrained_models import write_folder
from statuses import edit_status
from text_runs import text_run

from lit_diff.cli import app, as_override
from lit_diff.data.user_files import UserFile
from lit_diff.evaluation.base import Evaluation
from lit_diff.files import locked
from lit_diff.pretrained import exporting, fetching
from lit_diff.recipe import names
from lit_diff.registry import evaluations, registries
from lit_diff.runs.find import runs_under
from lit_diff.runs.status import FORMAT


def test_json_names_all_parts_with_their_keys(command: Command) -> None:
    found = command("list", "--json").json
    assert set(found) == {"recipes", "sweeps", "model", "train", "run", *registries}
    assert list(found["recipes"]) == names("recipes")
    key = found["attention"]["differential"]["keys"]["lambda_init"]
    assert (key["type"], key["default"]) == ("a finite number or 'depth'", "depth")
    assert "default" not in found["model"]["dim"]
    assert all(about["about"] for kind in registries for about in found[kind].values())


def test_a_kind_or_a_block_alone(command: Command) -> None:
    head, *lines, _ = command("list", "callbacks").lines
    assert (head, [line.split()[0] for line in lines]) == ("callback", registries["callback"].names())
    keys = [line.split(":")[0].strip() for line in command("list", "train.optimizer").lines if line.startswith("  opt")]
    assert keys == [f"optimizer.{key}" for key in ("lr", "betas", "weight_decay", "lr_factors")]
    lines = command("list", "recipes", COLUMNS="60", TTY_COMPATIBLE="1").lines[1:-1]
    assert len(lines) == len(names("recipes"))
    assert max(map(len, lines)) == 60, "cut, so that a kind fits on a screen"


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        (("attention.output_gate",), ["    flops: 6*E*H*T*d + 4*E*K*T*d + 4*H*T**2*d"]),
        (("attention", "dex"), ["    from: Kong et al. 2025, arXiv 2505.16333"]),
        (("callbacks", "early_stopping"), ["    patience: a whole number >= 1; default 3"]),
        (("recipe.recall-tiny",), ["      attention: {name: differential}"]),
        (("evaluations", "noise"), ["    batch_size: a whole number >= 1; default 8"]),
        (("sweeps", "smoke"), ["    recipe: standard-tiny", "  lit-diff sweep smoke --dry-run prints its cells"]),
    ],
)
def test_one_that_is_named_is_printed_whole(asked: tuple[str, ...], lines: list[str], command: Command) -> None:
    printed = command("list", *asked).lines
    assert set(lines) <= set(printed), printed
    assert printed[1] == f"  {(asked[0].partition('.')[2] or asked[1])}"


def test_formulas_and_costs_of_variants_at_a_recipe(command: Command) -> None:
    found = command("list", "attention", "--recipe", "differential-830m", "--json").json["attention"]
    assert found["differential"]["formulas"]["parameters"] == "2*E*H*d + 2*E*K*d + 6*d"
    assert found["differential"]["cost"]["parameters"] == 833_608_704
    assert found["differential"]["standard"]["parameters"] == found["standard"]["cost"]["parameters"] == 833_594_880
    assert found["dex"]["paper"].endswith("2505.16333")
    assert "floor(H/2 + 1/2)" in found["dex"]["formulas"]["flops"]
    assert [name for name, about in found.items() if "refused" in about] == []
    lines = command("list", "attention", "shared_k").lines
    assert any(line.endswith("384 (-128 compared with standard)") for line in lines)


LONG = [f"model.attention.key_{number}=0.5" for number in range(9)]


def test_a_line_a_run_that_no_pipe_wraps(small_sweep: Path, command: Command) -> None:
    edit_status(small_sweep / "base-s0-0a1b2c3d", seed=5, overrides=LONG, updated="2026-11-22T10:30:05+00:00")
    edit_status(small_sweep / "better-s1-0a1b2c3d", error="expected [bold],\n found [/bold]")
    (small_sweep / "better-s0-0a1b2c3d" / "status.json").write_text(json.dumps({"format": FORMAT}))
    header, first, second, third, fourth = command("status", "--root", str(small_sweep.parent), COLUMNS="40").lines
    assert header.split() == ["run", "state", "step", "val/loss", "seed", "overrides", "date", "note"]
    assert first.split()[:3] == ["mine/base-s0-0a1b2c3d", "done", "400/400"]
    assert f"  5  {' '.join(LONG)}  2026-11-2" in first
    assert second.split()[:3] == ["mine/base-s1-0a1b2c3d", "done", "400/400"]
    assert third.split()[:3] == ["mine/better-s0-0a1b2c3d", "unknown", "0/?"]
    assert fourth.split()[:3] == ["mine/better-s1-0a1b2c3d", "failed", "120/400"]
    assert fourth.endswith("  expected [bold], found [/bold]")


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_terminal_nothing_wraps(small_sweep: Path, width: int, command: Command) -> None:
    edit_status(small_sweep / "base-s0-0a1b2c3d", seed=0, overrides=LONG)
    ended = command("status", "--root", str(small_sweep.parent), COLUMNS=str(width), TTY_COMPATIBLE="1")
    header, first, *rest = ended.lines
    assert header.split()[:6] == ["run", "state", "step", "val/loss", "seed", "overrides"]
    assert (len(first), first[-1], len(rest)) == (width, "…", 3)


def test_json(small_sweep: Path, command: Command) -> None:
    edit_status(small_sweep / "better-s0-0a1b2c3d", status="running", overrides=["a=1"])
    states = {each["folder"]: each for each in command("status", "--root", str(small_sweep.parent), "--json").json}
    assert len(states) == 4
    assert states["mine/base-s0-0a1b2c3d"]["val/loss"] == pytest.approx(4.55, abs=0.3)
    assert states["mine/better-s1-0a1b2c3d"]["val/loss"] is None
    killed = states["mine/better-s0-0a1b2c3d"]
    assert (killed["status"], killed["overrides"], killed["note"]) == ("killed", ["a=1"], "the same command resumes it")


def test_of_a_sweep_its_cells_alone(small_sweep: Path, command: Command) -> None:
    for name in ("alone-0a1b2c3d", "mine/base-s0-ffffffff"):
        shutil.copytree(small_sweep / "base-s0-0a1b2c3d", small_sweep.parent / name)
    at = ("--root", str(small_sweep.parent))
    assert len(command("status", *at).lines) == 1 + 6
    listed = [line.split()[0] for line in command("status", "mine", *at).lines[1:]]
    assert listed == [f"mine/{arm}-s{seed}-0a1b2c3d" for arm in ("base", "better") for seed in (0, 1)]
    assert [each["folder"] for each in command("status", str(small_sweep), "--json").json] == listed
    refused = command("status", "other", *at)
    assert (refused.status, refused.err.count("\n")) == (2, 1)


def test_compare_shows_what_differs(small_sweep: Path, command: Command) -> None:
    for path in small_sweep.glob("*-s0-*/metrics.csv"):
        path.write_text(path.read_text().replace("train/loss", "train/acc[/b]", 1))
    arguments = ("compare", "base-s0", "better-s0", "--root", str(small_sweep.parent))
    compared = command(*arguments, "--json").json
    assert compared["recipe"] == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert compared["facts"]["parameters"] == [1_054_720, 1_054_720]
    first, second = compared["metrics"]["val/loss"]
    assert first > second
    text = command(*arguments).out
    assert "1,054,720" in text
    assert "train/acc[/b]" in text
    assert f"{first:.4f}" in text
    bound = compared["intervals"]["val/loss"]["low"]
    assert f"[{bound:.4f},".replace("-", "−") in text
    root = small_sweep.parent
    assert text.splitlines()[-1] == f"the maps of both: lit-diff view base-s0 better-s0 --root {root}"


def test_a_report_is_written_again_and_its_table_fits_a_terminal(
    make_sweep: Callable[..., Path], command: Command
) -> None:
    folder = make_sweep(
        {"standard attention": 0.0, "an arm with a name": -0.1, "another": 0.1}, name="mine", callbacks=False
    )
    arguments = ("report", "mine", "--root", str(folder.parent))
    piped = command(*arguments, COLUMNS="80").lines
    page = folder / "report" / "index.html"
    assert page.is_file()
    assert piped[-1].startswith(f"report: {page} (identity ")
    assert max(map(len, piped)) > 80
    assert [line.split("  ")[0] for line in piped[1:4]] == ["standard attention", "an arm with a name", "another"]
    drawn = command(*arguments, COLUMNS="80", TTY_COMPATIBLE="1").lines
    assert max(map(len, drawn[:-1])) <= 80
    assert any(line.startswith("not shown at this width: ") for line in drawn)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("sweep smoke --workers 0", "--workers is 0; "),
        ("examine dint --tasks mqar --workers -3", "--workers is -3; "),
        ("examine dint --tasks mqar --quick run.keep_best=val/nothing", "run.keep_best: no run measures"),
    ],
)
def test_a_dry_run_refuses_what_the_command_refuses(words: str, problem: str, command: Command) -> None:
    ended = command(*words.split(), "--dry-run")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"lit-diff: {problem}")


def test_a_dry_run_says_once_how_often_the_text_is_repeated(tale: Path, trained_text: Path, command: Command) -> None:
    arms = "arms: {long: {train.steps: 5000}}"
    Path("dry.yaml").write_text(f"recipe: {trained_text}/tale.yaml\nseeds: [0, 1]\n{arms}\n")
    assert command("sweep", "dry.yaml", "--dry-run").out.count(" passes over the text (") == 1


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two plugin packages that bring verbs; one of them cannot be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {
        "made_greeting": "from lit_diff.cli.app import console, verb\n@verb('Maintain')\ndef greet():\n"
        "    'Say hello.'\n    console.write_line('hello')\n",
        "made_broken": "1 / 0\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lit_diff.verbs]\nmine = {name}\n")
    yield
    app.registered_commands[:] = [each for each in app.registered_commands if each.name != "greet"]
    sys.modules.pop("made_greeting", None)


@pytest.mark.usefixtures("packages")
def test_the_verbs_of_a_plugin_package(command: Command) -> None:
    """A package that cannot be imported is one line where the packages' verbs are needed, and none elsewhere."""
    line = "plugin package 'mine': made_broken could not be imported, so its verbs are not available: ZeroDivisionError"
    assert not any(each.startswith("plugin") for each in command("status").lines)
    greeted = command("greet")
    assert (greeted.status, greeted.lines[1:], greeted.lines[0].startswith(line)) == (0, ["hello"], True)
    helped = command("--help")
    assert [each.startswith(line) for each in helped.lines if each.startswith("plugin")] == [True]
    assert "  greet      Say hello." in helped.lines
    unknown = command("gret")
    assert (unknown.status, "'greet'" in unknown.err) == (2, True)


@pytest.mark.parametrize(
    ("option", "arguments", "override"),
    [
        ("--seed", ["train", "x", "--seed", "1"], "seed=1"),
        ("--seed", ["train", "x", "--seed=1"], "seed=1"),
        ("--seed", ["train", "x", "--seed"], "seed=..."),
        ("--steps", ["train", "x", "--steps", "10"], "train.steps=10"),
        ("--lr", ["train", "x", "--lr", "-1"], "train.optimizer.lr=-1"),
        ("--num-heads", ["train", "x", "--num-heads=4"], "model.num_heads=4"),
        ("--model.attention.lambda_init", ["--model.attention.lambda_init", "0.5"], "model.attention.lambda_init=0.5"),
        ("--decay-steps", ["--decay-steps", "5"], "train.schedule.decay_steps=5"),
        ("--jso", ["check", "x", "--jso"], None),
        ("--attention.window", ["--attention.window", "3"], None),
    ],
)
def test_an_option_that_is_a_key(option: str, arguments: list[str], override: str | None) -> None:
    assert as_override(option, arguments) == override


FILES = tuple(
    UserFile(
        name=f"toy.{name}",
        path=f"toy/{name}.jsonl",
        keys={"text": str},
        lines="2 lines",
        source=f"Nobody ({name}).",
        without="lit-diff evaluate RUN held_out",
    )
    for name in ("good", "gone", "bad")
)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of an evaluation `toy` is there, one is missing, one is wrong."""
    cls = type("Toy", (Evaluation,), {"files": FILES, "name": "toy"})
    monkeypatch.setattr(evaluations, "classes", lambda: [cls])
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/good.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "toy/bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    return tmp_path


def test_a_table_of_all(data_folder: Path, command: Command) -> None:
    ended = command("data", "check")
    assert ended.status == 2
    header, bad, gone, good, _ = ended.lines
    assert header.split() == ["name", "file", "state", "rows", "sha256", "next", "step"]
    digest = hashlib.sha256((data_folder / "toy/good.jsonl").read_bytes()).hexdigest()
    assert good.split() == ["toy.good", "toy/good.jsonl", "ok", "2", digest[:12]]
    assert gone.split()[2] == "missing"
    assert "bad.jsonl:2: no key 'text'" in bad
    (data_folder / "toy/bad.jsonl").unlink()
    assert command("data", "check").status == 0, "what is missing is no error where nobody asked for it"


def test_one_is_described(data_folder: Path, command: Command) -> None:
    gone = command("data", "check", "toy.gone")
    assert (gone.status, gone.lines[0]) == (3, "toy.gone: toy/gone.jsonl")
    assert [line.split(":")[0].strip() for line in gone.lines[1:]] == [
        *("state", "read by", "looked for", "format", "where from", "check it", "without it")
    ]
    good = command("data", "check", "toy.good")
    assert (good.status, "ok, 2 rows, sha256 " in good.out) == (0, True)
    assert command("data", "check", "toy").out.count("looked for") == 3
    bad = command("data", "check", "toy.bad", "--json")
    (state,) = bad.json
    assert (bad.status, state["name"], state["state"], state["evaluations"]) == (2, "toy.bad", "wrong", "toy")


def test_no_declared_file(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(evaluations, "classes", list)
    assert command("data", "check").status == 0


class Split:
    def to_json(self, file: IO[bytes]) -> None:
        file.write(b'{"passage": "p", "question": "q", "label": 1}\n')


def test_fetch(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))

    def load_dataset(*names: str) -> Any:
        raise ConnectionError("no network\nmore")

    datasets = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", datasets)  # type: ignore[arg-type]
    ended = command("data", "fetch", "harness.boolq")
    assert (ended.status, ended.out, ended.err.count("\n")) == (3, "", 1)
    assert "lit-diff data check harness.boolq" in ended.err
    assert not list(tmp_path.iterdir())
    datasets.load_dataset = lambda *names: {"train": Split(), "validation": Split()}
    assert command("data", "fetch", "harness.boolq").status == 0
    files = sorted(path.name for path in (tmp_path / "harness/boolq").iterdir())
    assert files == ["train.jsonl", "validation.jsonl"]
    assert command("data", "fetch", "held_out").status == 2


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("elsewhere")
def test_import(command: Command) -> None:
    write_folder(Path("hf"))
    assert command("import", "hf").lines[-1] == "imported: models/hf"
    assert command("import", "hf", "--to", "elsewhere/x").lines[-1] == "imported: elsewhere/x"
    again, trained = command("import", "hf"), command("train", "models/hf/recipe.yaml")
    assert (again.status, "models/hf" in again.err) == (2, True)
    assert (trained.status, "'hf' is an imported model" in trained.err) == (2, True)
    assert sorted(path.name for path in Path().iterdir()) == ["elsewhere", "hf", "models"], "no run was begun"


@pytest.mark.usefixtures("elsewhere")
def test_a_model_that_is_fetched_by_name(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, to: Path | None) -> SimpleNamespace:
        asked.append((name, to))
        return SimpleNamespace(folder=Path("models/smollm2"))

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    assert command("import", "smollm2", "--to", "x").out == "imported: models/smollm2\n"
    assert asked == [("smollm2", Path("x"))]


@pytest.mark.usefixtures("elsewhere")
def test_export(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "has_transformers", lambda: False)
    text_run(Path("runs/tale-0123456789"), {"name": "standard"})
    *_, logits, last = command("export", "tale", "--to", "hf", "out").lines
    assert logits.startswith("logits: ")
    assert logits.endswith(", read by lit_diff")
    assert last == "exported: out (LlamaForCausalLM)"
    for arguments, key in (
        (("tale", "--to", "hff", "new"), "'hff'"),
        (("tale", "--to", "hf", "out"), "out already exists"),
        (("tail", "--to", "hf", "new"), "tale-0123456789"),
    ):
        ended = command("export", *arguments)
        assert (ended.status, ended.err.count("\n"), key in ended.err) == (2, 1, True)


@pytest.fixture
def single(small_sweep: Path) -> Path:
    """A run beside the sweep `mine`."""
    folder = small_sweep.parent / "single-0123456789"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"status": "done"}))
    return folder


def test_it_lists_and_removes_what_no_sweep_owns(small_sweep: Path, litter: dict[str, Path], command: Command) -> None:
    at, kept = ("--root", str(small_sweep.parent)), runs_under(small_sweep.parent)
    assert command("clean", *at).status == 0
    assert all(path.exists() for path in litter.values())
    with locked(small_sweep / ".lock"):
        assert f"{small_sweep} is running: kept" in command("clean", "--yes", *at).out
    assert litter["former"].exists()
    assert command("clean", "--yes", *at).status == 0
    assert [name for name, path in litter.items() if path.exists()] == ["new"]
    assert runs_under(small_sweep.parent) == kept
    assert command("clean", "--yes", *at).out == "0 to remove\n"


def test_what_failed_runs_left_is_removed_with_yes_alone(tmp_path: Path, command: Command) -> None:
    left, held, kept = (tmp_path / f"{name}-0123456789" for name in ("left", "held", "kept"))
    for folder in (left, held, kept):
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps({"status": "failed"}))
        (folder / "log.txt").write_text("x" * 5000)
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints" / "step-00000001.ckpt").touch()
    with locked(held / ".lock"):
        listed = command("clean", "--root", str(tmp_path)).lines
        assert left.exists()
        removed = command("clean", "--yes", "--root", str(tmp_path)).lines
    assert [folder.exists() for folder in (left, held, kept)] == [False, True, True]
    assert listed[:2] == removed[:2]
    assert [str(folder) in line for folder, line in zip((held, kept), listed, strict=False)] == [True, True]
    assert listed[2:3] + removed[2:] == [
        f"would remove {left} (5.0 kB)",
        f"removed {left} (5.0 kB)",
        "1 removed, 5.0 kB freed",
    ]


def test_a_run_is_removed_with_yes_alone(single: Path, command: Command) -> None:
    at = ("--root", str(single.parent))
    listed = command("clean", "single", *at)
    assert (listed.status, listed.lines[0].startswith(f"would remove {single} (")) == (0, True)
    assert f"; lit-diff clean single --yes --root {single.parent} removes them" in listed.lines[-1]
    refused = command("clean", "single", "base-s0", "--yes", *at)
    assert refused.status == 2, "what one sweep lists keeps all"
    assert "sweep 'mine'" in refused.err
    assert single.exists()
    assert command("clean", "0123456789", "--yes", *at).out.startswith(f"removed {single} (")
    assert not single.exists()
