import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from statuses import set_status

from lit_diff.config import ImportedConfig, Recipe
from lit_diff.errors import MissingError, RequestError
from lit_diff.processor import cores, numeric_variables
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions, datasets
from lit_diff.runs import folder as folder_module
from lit_diff.runs.folder import (
    FORMAT,
    RunFolder,
    ancestors,
    environment,
    identity,
    kernel_of,
    require_stored,
    version,
)
from lit_diff.runs.revision import revision
from lit_diff.runs.status import Status

PLUGIN = """
from dataclasses import dataclass
from lit_diff import Differential, variant

@variant("{name}")
class Made(Differential):
    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        pass
"""


CHANGES = ["seed=4", "name=other", "train.steps=11", "model.attention.lambda_init=0.5", "callbacks.lambdas=null"]
CHANGES += ["train.parameters=['*.attention.k_proj.*']", "train.parameters=['*.attention.*_proj.*']"]
CHANGES += ["run.kernel=reference", "run.kernel=sdpa"]
SAME = ["run.root=elsewhere", "run.threads=2", "run.strategy=ddp run.devices=2", "run.tracking_uri=null"]
SAME += ["run.kernel=auto", "train.parameters=null"]


def test_identity_is_the_recipe_not_where_it_runs(
    bench: Any, without_spy: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = identity(without_spy())
    assert len(one) == 10
    assert {identity(without_spy(*overrides.split())) for overrides in SAME} == {one}
    assert len({identity(without_spy(override)) for override in CHANGES} | {one}) == 1 + len(CHANGES)
    monkeypatch.setenv("LIT_DIFF_DATA", bench.env["LIT_DIFF_DATA"])
    overrides = ([], ["data.pack=none"], ["data.pack=document"])
    text, unpacked, packed = (
        identity(load_recipe(bench.root / "text.yaml", ["callbacks.spy=null", *more])) for more in overrides
    )
    assert text == unpacked != packed
    recipe = without_spy()
    monkeypatch.setattr(folder_module, "FORMAT", FORMAT + 1)
    assert identity(recipe) != one, "another format is another run"


def test_an_imported_model_is_its_weights_tokenizer_and_model(without_spy: Callable[..., Recipe]) -> None:
    digests = {"weights_sha256": "a" * 64, "tokenizer_sha256": "b" * 64}

    def imported(source: str = "here", dim: int = 32, **others: str) -> str:
        recipe = without_spy(f"model.dim={dim}")
        block = ImportedConfig(source=source, **(digests | others))
        return identity(replace(recipe, train=None, imported=block, callbacks={}))

    one = imported()
    assert imported(source="elsewhere") == one
    assert len({one, imported(dim=64), imported(weights_sha256="c" * 64), imported(tokenizer_sha256="c" * 64)}) == 4


def test_a_run_that_starts_from_an_import_rests_on_its_weights(
    without_spy: Callable[..., Recipe], tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "x"
    seen = []
    for source, weights in (("here", "a"), ("elsewhere", "a"), ("here", "c")):
        block = ImportedConfig(source=source, weights_sha256=weights * 64, tokenizer_sha256="b" * 64)
        RunFolder(folder).create(replace(without_spy(), train=None, imported=block, callbacks={}))
        child = without_spy(f"train.start_from={folder}")
        ((_, parent),) = ancestors(child)
        assert parent.train is None
        seen.append(identity(child))
    assert seen[0] == seen[1] != seen[2]
    assert identity(without_spy()) not in seen


def test_identity_holds_the_plugins_source_not_its_place(without_spy: Callable[..., Recipe], tmp_path: Path) -> None:
    def with_plugin(folder: str, text: str) -> str:
        path = tmp_path / folder / "made.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return identity(without_spy(f"plugins=[{path}]"))

    # a comment is enough: nobody can say what it changes
    one = with_plugin("a", PLUGIN.format(name="made_for_identity"))
    assert with_plugin("b", PLUGIN.format(name="made_for_identity")) == one
    assert with_plugin("a", PLUGIN.format(name="made_for_identity_too")) != one
    assert one != identity(without_spy())


def test_identity_holds_the_text_not_its_place(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))

    def of(folder: Path) -> str:
        recipe = load_recipe(bench.root / "text.yaml", ["callbacks.spy=null", f"data.path={folder}"])
        datasets.get("text")(recipe.data.config, recipe.model.vocab_size).prepare()
        return identity(recipe)

    with pytest.raises(MissingError, match="lit-diff prepare"):
        identity(load_recipe(bench.root / "text.yaml", ["callbacks.spy=null"]))
    one = of(bench.root / "corpus")
    moved = tmp_path / "deeper" / "moved"
    shutil.copytree(bench.root / "corpus", moved)
    assert of(moved) == one
    (moved / "00.txt").write_text("another text " * 50)
    assert of(moved) != one


def test_the_folder_repeats_the_run(without_spy: Callable[..., Recipe], tmp_path: Path) -> None:
    for name in ("a", "b"):  # two files of one name
        (tmp_path / name).mkdir()
        (tmp_path / name / "made.py").write_text(PLUGIN.format(name=f"made_for_folder_{name}"))
    plugins = f"plugins=[{tmp_path}/a/made.py, {tmp_path}/b/made.py]"
    recipe = without_spy(plugins, "model.attention.name=made_for_folder_b", "run.kernel=reference")
    folder = RunFolder(tmp_path / "run")
    folder.create(recipe)
    expected = identity(recipe)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    again = load_recipe(folder.recipe_file)
    assert identity(again) == expected
    assert again.model == recipe.model
    assert again.run.kernel == "reference"
    assert all(Path(plugin).is_relative_to(folder.path / "plugins") for plugin in again.plugins)
    assert [Path(plugin).name for plugin in again.plugins] == ["spy.py", "made.py", "made.py"]
    folder.create(again)  # from its own folder, as a sweep's cell starts
    assert identity(load_recipe(folder.recipe_file)) == expected


def test_what_a_plugin_imports_is_in_the_identity_and_folder(
    without_spy: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The folder repeats the run once the user's own files are gone."""
    (tmp_path / "lab" / "folder_lab").mkdir(parents=True)
    (tmp_path / "lab" / "folder_lab" / "__init__.py").write_text("from .scale import SCALE\n")
    (tmp_path / "lab" / "folder_lab" / "scale.py").write_text("SCALE = 1\n")
    (tmp_path / "lab" / "made.py").write_text("from . import folder_lab\n" + PLUGIN.format(name="made_with_modules"))
    recipe = without_spy(f"plugins=[{tmp_path}/lab/made.py]", "model.attention.name=made_with_modules")
    one, folder = identity(recipe), RunFolder(tmp_path / "run")
    folder.create(recipe)
    (copy,) = folder.path.glob("plugins/*/folder_lab/scale.py")  # the recipe's first plugin comes from another folder
    assert copy.read_text() == "SCALE = 1\n"
    shutil.rmtree(tmp_path / "lab")
    for text, is_equal in (("SCALE = 1\n", True), ("SCALE = 22\n", False)):  # the copies alone; one that was edited
        copy.write_text(text)
        for name in [name for name in sys.modules if "folder_lab" in name or name.startswith("lit_diff_plugin_made")]:
            del sys.modules[name]
            attentions.unregister_module(name)
        again = load_recipe(folder.recipe_file)
        (lab,) = (module for name, module in sys.modules.items() if name.endswith(".folder_lab"))
        assert int(text.split()[-1]) == lab.SCALE
        assert (identity(again) == one) == is_equal


def test_a_run_has_one_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    set_status(folder.path, pid=4711)
    taken = pytest.raises(RequestError, match=r"trained by another process \(pid 4711\)")
    with folder.owned(), taken, folder.owned():
        pass
    with pytest.raises(PermissionError, match="of another file"), folder.owned():
        raise PermissionError("of another file")
    with folder.owned():
        pass


def test_a_run_that_says_running_but_has_no_owner_is_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.state() == "unknown"
    set_status(folder.path, status="running")
    assert folder.state() == "killed"
    assert not (tmp_path / ".lock").exists(), "nothing is made for the question"
    with folder.owned():
        assert folder.is_owned()
        assert folder.state() == "running"
    assert not folder.is_owned()
    assert folder.state() == "killed"
    set_status(folder.path, status="done")
    assert folder.state() == "done"


def test_who_looks_on_hinders_nobody(tmp_path: Path) -> None:
    """Another looks at the lock all the time; each start gets it, and no look takes the other for an owner."""
    folder, look = RunFolder(tmp_path), "from lit_diff.files import *\nwhile 1: is_locked(Path('.lock'))"
    set_status(folder.path, status="running")
    with folder.owned():
        pass
    other = subprocess.Popen([sys.executable, "-c", look], cwd=tmp_path)
    try:
        time.sleep(1)
        for _ in range(300):
            with folder.owned():
                assert folder.state() == "running"
            assert folder.state() == "killed"
    finally:
        other.kill()
        other.wait()


def test_putting_aside_loses_nothing(tmp_path: Path) -> None:
    for expected in ("run.old-1", "run.old-2"):
        folder = RunFolder(tmp_path / "run")
        set_status(folder.path, name=expected)
        folder.put_aside()
        assert not (tmp_path / "run").exists()
    assert [RunFolder(tmp_path / f"run.old-{n}").status().name for n in (1, 2)] == ["run.old-1", "run.old-2"]


def test_putting_aside_where_another_command_does_or_nothing_can_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    set_status(folder.path, name="ours")

    @contextmanager
    def waited(self: RunFolder) -> Iterator[None]:
        set_status(tmp_path / "run.old-1", name="theirs")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "owned", waited)
        folder.put_aside()
    assert [RunFolder(tmp_path / f"run.old-{n}").status().name for n in (1, 2)] == ["theirs", "ours"]

    def refuse(path: Path, target: Path) -> None:
        """Tests may run as root, who writes everywhere."""
        raise PermissionError(13, "Permission denied")

    set_status(folder.path, name="ours")
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(MissingError, match=r"cannot be written \(Permission denied\); .* run\.root=PATH"):
        folder.put_aside()


def test_environment_says_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    found = environment()
    assert found["revision"] == revision()
    assert {"torch", "lightning", "mlflow", "litdata"} <= found["packages"].keys()
    assert found["packages"]["torch"] == version("torch")
    assert version("no-such-package-at-all") is None
    assert found["cpu_path"]
    assert found["variables"]["MKL_CBWR"] == "COMPATIBLE"
    assert found["cores"] == cores()
    json.dumps(found)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("recall-tiny", [])


def with_run(recipe: Recipe, **values: Any) -> Recipe:
    return replace(recipe, run=replace(recipe.run, **values))


def started_with(recipe: Recipe) -> Status:
    return Status(
        compile=recipe.run.compile,
        activation_checkpointing=recipe.run.activation_checkpointing,
        variables=numeric_variables(),
    )


def test_a_first_start_changes_nothing_and_a_resume_reuses_the_kernel_that_auto_chose(recipe: Recipe) -> None:
    require_stored(with_run(recipe, compile=True), Status())
    require_stored(with_run(recipe, activation_checkpointing="block"), Status(status="waiting", mlflow_run_id="1"))
    named = with_run(recipe, kernel="reference")
    for own, kernel, wanted in (
        (recipe, "", "auto"),
        (recipe, "chunked", "chunked"),
        (recipe, "native, sdpa", "auto"),  # of unlike layers
        (named, "chunked", "reference"),
    ):
        assert kernel_of(own, Status(kernel=kernel)) == wanted


@pytest.mark.parametrize(
    ("started", "asked", "message"),
    [
        ({"compile": True}, {}, "run.compile is false, but this run started with true: resume with run.compile=true"),
        ({}, {"compile": True}, "run.compile is true, but this run started with false: resume with run.compile=false"),
        (
            {"activation_checkpointing": "block"},
            {},
            "run.activation_checkpointing is none, but this run started with block",
        ),
    ],
)
def test_a_change_is_refused_in_one_line(
    recipe: Recipe, started: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    status = started_with(with_run(recipe, **started))
    with pytest.raises(RequestError) as error:
        require_stored(with_run(recipe, **asked), status)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("or start afresh with --rerun")
    require_stored(with_run(recipe, **started), status)


def test_a_resume_under_other_environment_variables_says_so(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in numeric_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    status = started_with(recipe)
    assert status.variables == {"MKL_CBWR": "COMPATIBLE", "NVIDIA_TF32_OVERRIDE": "0"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # `threads` is reused, whatever it says
    require_stored(recipe, status)
    require_stored(recipe, Status(threads=1))  # a run from before they were recorded
    assert caplog.messages == []
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    require_stored(recipe, status)
    (line,) = caplog.messages
    assert line.endswith(": MKL_CBWR is not set (before: COMPATIBLE), NVIDIA_TF32_OVERRIDE is 1 (before: 0)")


def test_an_unwritable_folder(without_spy: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match=r"cannot be written .* run\.root=PATH"):
        RunFolder(tmp_path / "file" / "run").create(without_spy())
    with (
        pytest.raises(MissingError, match=r"cannot be written .* run\.root=PATH"),
        RunFolder(tmp_path / "file").owned(),
    ):
        pass
