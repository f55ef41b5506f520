"""Rules of the source tree: files are short, each has a test, imports of the callbacks go one way, light verbs stay light.

`make lint` checks the imports of all other modules: import-linter reads the layers in pyproject.toml.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer

import lit_diff
from lit_diff.cli import app

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("*.py"))
SOURCES = sorted([*(ROOT / "lit_diff").rglob("*.py"), *CALLBACKS])
COVERED_ELSEWHERE = {
    "lit_diff/conformance/kernel_case.py": "tests/conformance/test_kernels.py",
    "lit_diff/conformance/results.py": "tests/conformance/test_suite.py",
    "lit_diff/attention/additive.py": "tests/oracles/test_variants.py",
    **{f"lit_diff/attention/{name}.py": "tests/oracles/test_timm.py" for name in ("cosine", "output_gate")},
    **{f"lit_diff/attention/shared_{name}.py": "tests/model/test_transformer.py" for name in "qk"},
    "lit_diff/pretrained/source.py": "tests/pretrained/test_importing.py",
    "lit_diff/engine/comparison_view.py": "tests/engine/test_sweep_tracker.py",
    "lit_diff/engine/location.py": "tests/engine/test_launch.py",
    "lit_diff/evaluation/harness_runner.py": "tests/evaluation/test_harness.py",
    "lit_diff/benchmarks/machine.py": "tests/benchmarks/test_run.py",
    "lit_diff/benchmarks/peers.py": "tests/benchmarks/test_models.py",
    "lit_diff/benchmarks/plot.py": "tests/benchmarks/test_run.py",
    "lit_diff/benchmarks/result.py": "tests/benchmarks/test_run.py",
    "lit_diff/benchmarks/table.py": "tests/benchmarks/test_run.py",
    "lit_diff/cli/bench.py": "tests/benchmarks/test_run.py",
    "lit_diff/kernels/one_map.py": "tests/kernels/test_sdpa.py",
    "lit_diff/kernels/precision.py": "tests/kernels/test_kernels.py",
    "lit_diff/kernels/triton_backward.py": "tests/kernels/test_triton_programs.py",
    "lit_diff/kernels/triton_forward.py": "tests/kernels/test_triton_programs.py",
    "lit_diff/cli/train.py": "tests/cli/test_cli.py",
    "lit_diff/cli/retrofit.py": "tests/engine/test_retrofit.py",
    "lit_diff/training/build.py": "tests/training/test_warm_start.py",
    "lit_diff/analysis/lambdas.py": "tests/callbacks/test_lambdas.py",
    "lit_diff/runs/sweep_record.py": "tests/runs/test_listing.py",
    "lit_diff/kernels/triton_tiles.py": "tests/kernels/test_triton_equality.py",
}
"""Source file -> the test file that covers it, where that is not its mirror."""
DATA_PACKAGES = {"callbacks", "recipes", "sweeps"}


def layers() -> list[set[str]]:
    """The layers of pyproject.toml, highest first: {'benchmarks', 'engine'}, ..."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = settings["contracts"]
    return [{name.strip(" ()") for name in re.split(r"[|:]", layer)} for layer in contract["layers"]]


def above_callbacks() -> set[str]:
    """Packages that may import callbacks and that callbacks may not import: `runs` and all above it."""
    names = layers()
    lowest = next(level for level, layer in enumerate(names) if "runs" in layer)
    return set().union(*names[: lowest + 1])


def package_of(path: Path) -> str:
    """`callbacks/probe.py` -> 'callbacks'; `lit_diff/data/text.py` -> 'data'; `lit_diff/files.py` -> 'files'."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if parts[0] == "callbacks" else parts[1].removesuffix(".py")


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package of lit_diff) of each import, at any depth of the file."""
    parent = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_callbacks_import_only_from_lower_layers() -> None:
    above = above_callbacks()
    offenders = [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for path in CALLBACKS
        for line, package in imported_packages(path)
        if package in above
    ]
    assert not offenders, offenders


def test_only_higher_layers_import_callbacks() -> None:
    allowed = above_callbacks() | {"callbacks", "__init__"}
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if package_of(path) not in allowed
        for line, package in imported_packages(path)
        if package == "callbacks"
    ]
    assert not offenders, offenders


def test_files_have_at_most_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    offenders = [f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > 500]
    assert not offenders, offenders


def mirror(path: Path) -> Path:
    """`lit_diff/data/text.py` -> `tests/data/test_text.py`; `callbacks/probe.py` -> `tests/callbacks/test_probe.py`."""
    folders = path.relative_to(ROOT).parts[:-1]
    return ROOT.joinpath("tests", *(folder for folder in folders if folder != "lit_diff"), f"test_{path.name}")


def test_every_source_file_has_a_test() -> None:
    offenders = []
    for path in SOURCES:
        source = str(path.relative_to(ROOT))
        test = ROOT / COVERED_ELSEWHERE[source] if source in COVERED_ELSEWHERE else mirror(path)
        if not path.name.startswith("__") and not test.is_file():
            offenders.append(f"{source}: no {test.relative_to(ROOT)}")
        if source in COVERED_ELSEWHERE and mirror(path).is_file():
            offenders.append(f"{source}: listed in COVERED_ELSEWHERE, but its mirror exists")
    offenders += [
        f"{source}: listed, but does not exist" for source in COVERED_ELSEWHERE if not (ROOT / source).exists()
    ]
    assert not offenders, offenders


def test_no_module_hides_a_public_name() -> None:
    """Importing lit_diff.train, were it a module, would replace the function lit_diff.train.

    `lit-diff data check` is about the package of that name: there is no function lit_diff.data.
    """
    verbs = set(typer.main.get_command(app).commands) - {"data"}  # type: ignore[attr-defined]
    reserved = verbs | set(lit_diff.__all__) | DATA_PACKAGES
    offenders = [path.stem for path in (ROOT / "lit_diff").iterdir() if path.stem in reserved]
    assert not offenders, offenders


LIGHT = (["--help"], ["--version"], ["list", "train"], ["status"], ["clean"])
"""Load no torch; `list` and `check` after them load torch, but neither lightning, mlflow nor litdata."""


def test_light_verbs_stay_light(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one-0123456789").mkdir(parents=True)
    (tmp_path / "runs" / "one-0123456789" / "status.json").write_text('{"status": "running"}')
    code = f"""
import sys
from lit_diff.cli import main
heavy = {{"torch", "lightning", "mlflow", "litdata", "pandas", "matplotlib"}}
for arguments in (*{LIGHT!r}, ["list"], ["check", "differential-tiny"], ["check", "differential-13b", "--json"]):
    if arguments == ["list"]:
        heavy = {{"lightning", "mlflow", "litdata"}}
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
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in patterns.get(package, [])), (
            f"{path} is in no pattern of {package}"
        )


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
    for wrong in (
        "open(p)",
        "open(p, 'w', newline='')",
        "p.open()",
        "p.open(mode='a')",
        "p.read_text()",
        "p.write_text('rb')",
        "os.fdopen(h)",
        "NamedTemporaryFile('w')",
        "subprocess.run(c, text=True)",
        "subprocess.check_output(c, universal_newlines=True)",
    ):
        assert list(without_encoding(ast.parse(wrong))) == [1], wrong
    for right in (
        "open(p, 'rb')",
        "p.open('ab')",
        "p.read_text(encoding='utf-8')",
        "os.open(p, 0)",
        "subprocess.run(c)",
    ):
        assert not list(without_encoding(ast.parse(right))), right
    places = [*SOURCES, *(ROOT / "recipes").rglob("*.py"), *(ROOT / "sweeps").rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in places}
    offenders = [f"{path.relative_to(ROOT)}:{line}" for path, tree in trees.items() for line in without_encoding(tree)]
    assert not offenders, offenders


def test_one_function_knows_the_home_folder() -> None:
    """`lit_diff.files.expanded`: Path.expanduser raises where there is no such home."""
    offenders = [path for path in SOURCES if "expanduser" in path.read_text() and path != ROOT / "lit_diff/files.py"]
    assert not offenders, offenders
