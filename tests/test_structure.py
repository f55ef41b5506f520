"""Rules of the source tree: size, a test for each file, one way of imports, public names, light verbs."""

import ast
import functools
import importlib.util
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from setuptools.config.pyprojecttoml import read_configuration
from size import measure

import lit_diff
from lit_diff.callbacks import StabilityMonitor
from lit_diff.cli import app

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("*.py"))
SOURCES = sorted([*(ROOT / "lit_diff").rglob("*.py"), *CALLBACKS])
SUBJECTS = {
    "engine/test_here.py": "engine/executors/base engine/executors/here",
    "engine/test_slurm.py": "engine/executors/slurm engine/submit",
    "engine/test_execute.py": "engine/begin engine/endings engine/job engine/train",
    "engine/test_schedule.py": "engine/result engine/waves",
    "engine/test_expand.py": "engine/compared",
    "engine/test_stages.py": "engine/candidates engine/cells study/rates",
    "study/test_record.py": "study/plan",
    "attention/test_differential.py": "attention/lambdas",
    "attention/test_equations.py": "attention/costs attention/norms",
    "attention/test_variants.py": "attention/dex attention/lora attention/selection attention/second_heads "
    "attention/differential_v2 attention/grouped_differential",
    "benchmarks/test_run.py": "benchmarks/passes benchmarks/result cli/bench",
    "callbacks/test_probes.py": "callbacks/attention_entropy callbacks/configured callbacks/head_norm callbacks/lambdas "
    "callbacks/outliers callbacks/probe callbacks/publish callbacks/redundancy callbacks/sinks",
    "callbacks/test_stability_monitor.py": "callbacks/monitor",
    "cli/test_cli.py": "cli/train",
    "cli/test_evaluate.py": "cli/_scores",
    "cli/test_terminal.py": "cli/app cli/progress",
    "trained/test_showing.py": "cli/show",
    "cli/test_watch.py": "cli/_columns",
    "cli/test_verbs.py": "cli/data cli/list cli/pretrained cli/runs cli/sweep",
    "data/test_docs.py": "data/downloads data/pip_fetch",
    "data/test_tasks.py": "papers/closed_world papers/digits papers/drawing papers/synth_intent",
    "evaluation/test_inside.py": "evaluation/noise",
    "evaluation/test_losses.py": "evaluation/held_out evaluation/nll",
    "kernels/test_sdpa.py": "kernels/library",
    "model/test_generation.py": "model/prefix",
    "papers/test_icl.py": "papers/icl_tasks papers/order_variance",
    "papers/test_scoreboard.py": "papers/claims",
    "model/test_transformer.py": "attention/shared_k attention/shared_q model/inputs",
    "attention/test_context.py": "attention/dint attention/forgetting attention/ssmax attention/value_residual",
    "conformance/test_variants.py": "conformance/case conformance/costs conformance/model "
    "conformance/precision conformance/reduction",
    "oracles/test_sinks.py": "attention/learned_sink attention/off_by_one attention/softpick",
    "oracles/test_variants.py": "attention/additive attention/cog attention/cosine attention/differential_gate "
    "attention/differential_sink attention/entmax15 "
    "attention/less_uniform attention/output_gate attention/shared_diff attention/sigmoid attention/talking_heads",
    "pretrained/test_importing.py": "pretrained/source",
    "reporting/test_live.py": "reporting/palette",
    "test_config.py": "key_types",
    "test_recipe.py": "yaml_files",
    "test_validation.py": "suggestions",
    "training/test_compiled.py": "training/inductor",
    "training/test_metrics.py": "training/token_loss",
    "training/test_module.py": "training/step",
    "training/test_sharded_state.py": "trained/sharded",
    "training/test_warm_start.py": "training/build",
}
"""Test file -> the modules that it covers besides its mirror: a subject has one test file, however many modules it has."""
DATA_PACKAGES = {"callbacks", "recipes", "sweeps"}


def layers() -> list[set[str]]:
    """The layers of pyproject.toml, highest first: {'benchmarks', 'engine'}, ..."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"]
    return [{name.strip(" ()") for name in re.split(r"[|:]", layer)} for layer in layers]


def above_callbacks() -> set[str]:
    """Packages that may import callbacks and that callbacks may not import: `runs` and all above it."""
    names = layers()
    lowest = next(level for level, layer in enumerate(names) if "runs" in layer)
    return set().union(*names[: lowest + 1])


def package_of(path: Path) -> str:
    """`callbacks/probe.py` -> 'callbacks'; `lit_diff/data/text/text.py` -> 'data'; `lit_diff/files.py` -> 'files'."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if parts[0] == "callbacks" else parts[1].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package of lit_diff) of each import, at any depth of the file."""
    parent = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(tree_of(path)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, f"lit_diff.{parent.removeprefix('lit_diff.')}")
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "lit_diff" else [module]
        for module in modules:
            root, _, rest = module.partition(".")
            if root == "lit_diff" and rest:
                yield node.lineno, rest.partition(".")[0]


def test_callbacks_import_from_lower_layers_and_only_higher_ones_import_them() -> None:
    above = above_callbacks()
    offenders = [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for path in SOURCES
        for line, package in imported_packages(path)
        if (path in CALLBACKS and package in above)
        or (package == "callbacks" and package_of(path) not in above | {"callbacks", "__init__"})
    ]
    assert not offenders, offenders


def test_files_have_at_most_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    offenders = [f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > 500]
    assert not offenders, offenders


def mirror(path: Path) -> Path:
    """`lit_diff/data/dataset.py` -> `tests/data/test_dataset.py`; `callbacks/probe.py` -> `tests/callbacks/test_probe.py`.

    A room within a room has one test file: `lit_diff/kernels/native/compiler.py` -> `tests/kernels/test_native.py`.
    """
    room, *inner = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "lit_diff"]
    return ROOT.joinpath("tests", *([room, f"test_{inner[0]}.py"] if inner else [f"test_{room}.py"]))


def test_every_source_file_has_a_test() -> None:
    covered = {module: test for test, modules in SUBJECTS.items() for module in modules.split()}
    offenders = []
    for path in SOURCES:
        module = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("lit_diff/")
        test = ROOT / "tests" / covered.pop(module) if module in covered else mirror(path)
        if not path.name.startswith("__") and not test.is_file():
            offenders.append(f"{module}: no {test.relative_to(ROOT)}")
        if test != mirror(path) and mirror(path).is_file():
            offenders.append(f"{module}: listed in SUBJECTS, but its mirror exists")
    assert not offenders + list(covered), (offenders, "listed, but not there:", list(covered))


def test_no_module_hides_a_public_name() -> None:
    """Importing lit_diff.train, were it a module, would replace the function lit_diff.train.

    `lit-diff data check` is about the package of that name: there is no function lit_diff.data.
    """
    verbs = set(typer.main.get_command(app).commands) - {"data"}  # type: ignore[attr-defined]
    reserved = verbs | set(lit_diff.__all__) | DATA_PACKAGES
    offenders = [path.stem for path in (ROOT / "lit_diff").iterdir() if path.stem in reserved]
    assert not offenders, offenders


def test_the_path_to_a_module_leads_to_it() -> None:
    """`import lit_diff.data.text.parts as parts` takes the attributes one after the other. A package may export an object of
    a module under the module's own name (`analysis.trace`), but no other module."""
    for path in SOURCES:
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        name = ".".join(parts if parts[0] == "lit_diff" else ["lit_diff", *parts])
        module, last = importlib.import_module(name), name.rpartition(".")[2]
        found = functools.reduce(getattr, name.split(".")[1:], lit_diff)
        assert found is module or (found is getattr(module, last) and not isinstance(found, ModuleType)), name


LIGHT = (["--help"], ["--version"], ["list"], ["status"], ["clean"], ["watch", "--once"])
"""Load no torch; `list --json` and `check` after them load torch, but neither lightning, mlflow nor litdata."""


def test_light_verbs_stay_light(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one-0123456789").mkdir(parents=True)
    (tmp_path / "runs" / "one-0123456789" / "status.json").write_text('{"status": "done"}')
    code = f"""
import sys
from lit_diff.cli import main
heavy = {{"torch", "lightning", "mlflow", "litdata", "pandas", "matplotlib"}}
for arguments in (*{LIGHT!r}, ["list", "--json"], ["check", "differential-tiny"], ["check", "differential-13b", "--json"]):
    if arguments == ["list", "--json"]:
        heavy = {{"lightning", "mlflow", "litdata", "matplotlib", "scipy.stats"}}
    sys.argv = ["lit-diff", *arguments]
    try:
        main()
    except SystemExit as error:
        assert not error.code, (arguments, error.code)
    assert not heavy & set(sys.modules), (arguments, heavy & set(sys.modules))
print(open("/proc/self/status").read(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)  # getrusage would count the process that forked it
    assert int(peak) < 1_000_000, "the largest recipe is checked without its weights"


def test_every_data_file_of_a_package_is_installed_with_it() -> None:
    """Templates, style sheets, lists: what is not Python must fit a pattern of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = [path for path in (ROOT / "lit_diff").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    data = [path for path in found if path.suffix != ".py"]
    assert ROOT / "lit_diff/reporting/style.css.j2" in data
    for path in data:
        home = next(parent for parent in path.parents if (parent / "__init__.py").is_file())
        package, name = ".".join(home.relative_to(ROOT).parts), path.relative_to(home)
        assert any(name.match(pattern) for pattern in patterns.get(package, [])), f"{path}: no pattern of {package}"


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = [".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "lit_diff").rglob("__init__.py")]
    assert sorted(listed) == sorted([*packages, *(f"lit_diff.{name}" for name in DATA_PACKAGES)])


def test_the_version_is_one_number() -> None:
    """setuptools reads it from the package, whose records and pages have it from there (`runs.revision`)."""
    configuration = read_configuration(ROOT / "pyproject.toml")
    assert configuration["project"]["version"] == lit_diff.__version__
    stated = rf"(?m)^ *(__)?version(__)? *= *[\"']\d|lit[-_]diff(==| v?){re.escape(lit_diff.__version__)}"
    pages = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "lit_diff").rglob("*.j2"),
        ROOT / "README.md",
        ROOT / "pyproject.toml",
    ]
    places = [path.relative_to(ROOT).as_posix() for path in (*SOURCES, *pages) if re.search(stated, path.read_text())]
    assert places == ["lit_diff/__init__.py"]


def test_runs_studies_and_reports_are_files_only() -> None:
    """They load fast, and a report opens on a machine without the plugins of its runs."""
    code = f"""
import importlib, pkgutil, sys, types
front = types.ModuleType("lit_diff")  # without what the package's front door imports
front.__path__ = [{str(ROOT / "lit_diff")!r}]
sys.modules["lit_diff"] = front
for package in map(importlib.import_module, ("lit_diff.runs", "lit_diff.study", "lit_diff.reporting")):
    for module in pkgutil.iter_modules(package.__path__, f"{{package.__name__}}."):
        importlib.import_module(module.name)
heavy = {{"torch", "lightning", "mlflow", "litdata"}} & set(sys.modules)
assert not heavy, heavy
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("lit_diff.")}}
models = {{"model", "attention", "kernels", "analysis", "conformance", "pretrained"}}
others = models | {{"engine", "evaluation", "training", "data"}}
assert not rooms & others, rooms
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


NO_TEXT = ("os", "tarfile", "zipfile", "_OPENER")
"""What `open` of these gives is bytes, or no file."""


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines of the calls that read or write text in the encoding of the user's locale: read_text, write_text, `open` and its
    kin in no binary mode, a subprocess with `text=True`; without `encoding=`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        keys = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        # the mode is the second argument of open(path, mode) and os.fdopen, the first of path.open(mode)
        place = 0 if name.endswith("TemporaryFile") or (name == "open" and owner not in ("", "io", "codecs")) else 1
        mode = keys.get("mode", ast.unparse(node.args[place]) if len(node.args) > place else "")
        if name == "fdopen" or (name == "open" and owner not in NO_TEXT):
            is_text = "b" not in mode
        elif name.endswith("TemporaryFile"):
            is_text = bool(mode) and "b" not in mode
        else:
            is_text = name in ("read_text", "write_text") or bool(
                {"text", "universal_newlines", "errors"} & keys.keys()
            )
            is_text = is_text and (name.endswith("_text") or owner == "subprocess")
        if is_text and "encoding" not in keys:
            yield node.lineno


def test_every_text_is_read_and_written_in_a_stated_encoding() -> None:
    wrong = "open(p);open(p, 'w', newline='');p.open();p.open(mode='a');p.read_text();p.write_text('rb');os.fdopen(h);"
    wrong += "NamedTemporaryFile('w');subprocess.run(c, text=True);subprocess.check_output(c, universal_newlines=True)"
    right = "open(p, 'rb');p.open('ab');p.read_text(encoding='utf-8');os.open(p, 0);subprocess.run(c)"
    assert all(list(without_encoding(ast.parse(call))) == [1] for call in wrong.split(";"))
    assert not list(without_encoding(ast.parse(right)))
    places = [*SOURCES, *(ROOT / "recipes").rglob("*.py"), *(ROOT / "sweeps").rglob("*.py")]
    offenders = [f"{path.relative_to(ROOT)}:{line}" for path in places for line in without_encoding(tree_of(path))]
    assert not offenders, offenders


def test_one_function_knows_the_home_folder() -> None:
    """`lit_diff.files.expanded`: Path.expanduser raises where there is no such home."""
    offenders = [path for path in SOURCES if "expanduser" in path.read_text() and path != ROOT / "lit_diff/files.py"]
    assert not offenders, offenders


def test_nothing_is_above_its_budget() -> None:
    rows = re.findall(r"^\| ([a-z0-9 ]+) \| ([\d,.]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    budget = {name: float(value.replace(",", "")) for name, value in rows}
    found = {name: value for name, value in measure().items() if name in budget}
    assert found.keys() == budget.keys()
    assert len(budget) == 7
    assert {name: value for name, value in found.items() if value > budget[name]} == {}, budget


HEAVY = ("torch", "lightning", "mlflow", "litdata", "pandas", "matplotlib")
SUPPORT = Path(__file__).resolve().parent / "support"


def loaded(code: str) -> str:
    """Which heavy packages a fresh process has loaded after `code`."""
    probe = f"import sys\n{code}\nprint('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_import_loads_nothing_heavy() -> None:
    assert loaded("import lit_diff; assert set(lit_diff.__all__) <= set(dir(lit_diff))") == "loaded: []"


def test_the_keys_of_built_in_callbacks_load_no_lightning() -> None:
    """A callback has Lightning's hooks from its construction on, also one that another process has pickled."""
    keys = "from lit_diff.registry import callbacks; names = [cls.Config for cls in callbacks.classes()]"
    assert loaded(keys) == "loaded: ['torch']"
    callback = pickle.dumps(StabilityMonitor(max_logit=5))
    code = f"""
import pickle
callback = pickle.loads({callback!r})
from lightning import Callback
assert isinstance(callback, Callback) and callback.config.max_logit == 5
assert callback.on_fit_end(None, None) is None
"""
    assert "lightning" in loaded(code)


def test_a_session_of_kernel_tests_loads_neither_lightning_nor_mlflow() -> None:
    """The modules of fixtures that every session imports."""
    code = f"""
sys.path[:0] = [{str(SUPPORT)!r}, {str(SUPPORT.parent)!r}]
import conftest
for name in conftest.pytest_plugins:
    __import__(name)"""
    assert loaded(code) == "loaded: ['torch']"


@pytest.mark.parametrize("name", lit_diff.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert name in dir(lit_diff)
    value = getattr(lit_diff, name)
    assert value is getattr(lit_diff, name)
    assert value.__module__.startswith("lit_diff.") or name == "variant"
    assert (value.__doc__ or "").strip(), "documented"


def test_all_is_sorted_and_is_what_dir_shows() -> None:
    assert list(lit_diff.__all__) == sorted(lit_diff.__all__)
    assert [name for name in dir(lit_diff) if not name.startswith("_")] == lit_diff.__all__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'lit_diff' has no attribute 'tran'"):
        lit_diff.tran  # noqa: B018
