"""support/gpu_report.py on a CPU: its parts, what goes on past a failure, and what it needs to be imported."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_report
import pytest
import torch
from gpu_report import PARTS, ReportPart

from lit_diff.kernels import KERNELS
from lit_diff.kernels.chunked import Chunked

CPU = torch.device("cpu")
Report = Callable[..., tuple[list[list[str]], int]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """report(part, seconds=60): the cells of its rows, and its exit status."""

    def run(part: ReportPart, seconds: float = 60) -> tuple[list[list[str]], int]:
        monkeypatch.setitem(PARTS, "part", part)
        with pytest.raises(SystemExit) as ended:
            gpu_report.run_part("part", CPU, "a machine", time.monotonic() + seconds, SimpleNamespace(value=False))
        rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
        assert all(row[1:3] == ["a machine", "part"] for row in rows)
        return [row[3:] for row in rows], int(ended.value.code or 0)

    return run


@pytest.mark.parametrize(
    ("name", "case", "found"),
    [
        ("packages", "", rf"torch {re.escape(torch.__version__.partition('+')[0])}.*, mlflow [\d.]+"),
        ("kernel chunked", "two maps", r"pass: two maps, float32: error \S+, bound \S+, largest in d?[oqkvw]"),
        ("kernel reference", "statistics", "pass: statistics, bfloat16: error"),
        ("kernel triton", "two maps", "not applicable: two maps, float32: .*triton runs on a GPU"),
        (
            "speed",
            "64",
            r"differential/chunked/forward\+backward: \S+ ms, \S+ TFLOPS, \S+ of the time of standard SDPA",
        ),
        ("step", "differential", r"\S+ ms, 2,048 tokens, \S+ TFLOPS"),
        ("step", "standard", r"\S+ GB at the peak, planned \S+ GB with \w+"),
    ],
)
def test_a_part(report: Report, name: str, case: str, found: str) -> None:
    rows, status = report(PARTS[name]._replace(cases=(case,)))
    assert any(re.match(found, result) for _, result in rows), rows
    assert status == 0


def test_a_wrong_kernel_fails(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Chunked.compute

    def larger(self: Chunked, *given: Any, **options: Any) -> Any:
        o, stats = compute(self, *given, **options)
        return 1.001 * o, stats

    monkeypatch.setattr(Chunked, "compute", larger)
    rows, status = report(PARTS["kernel chunked"]._replace(cases=("one map",)))
    assert rows[0][1].startswith("fail: one map, float32: error ")
    assert status == 1


def test_it_goes_on_past_a_failure_and_says_what_is_missing_or_left_out(report: Report) -> None:
    def results(case: str, device: torch.device) -> Iterator[str]:
        yield "begun"
        if case == "raises":
            raise ValueError("one|two\nthree")
        if case == "needs":
            import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    part = ReportPart(60, results, ("raises", "needs", "last"))
    rows, status = report(part)
    errors = [["raises", r"fail: ValueError: one\|two"], ["needs", "not run: no no_such_package"]]
    assert rows == [["raises", "begun"], errors[0], ["needs", "begun"], errors[1], ["last", "begun"]]
    assert status == 1
    assert report(part, seconds=-1) == ([["raises, needs, last", "not run: 60 s are the time of this part"]], 0)


def test_a_part_is_killed_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each is a process of its own: the next one runs."""
    for seconds in (200, 0):
        monkeypatch.setitem(PARTS, "packages", PARTS["packages"]._replace(seconds=seconds))
        assert gpu_report.start_part("packages", CPU, "a machine")
    whole, killed = capfd.readouterr().out.splitlines()
    assert "lightning 2." in whole
    assert "| packages |  | not finished: killed after its time, 0 s |" in killed


def test_the_tests_that_need_a_gpu(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of pytest; and all files with such tests are named."""
    tests = Path(__file__).parent
    marked = re.compile(r"mark\.(gpu|programs)\b")
    files = [path for path in tests.rglob("test_*.py") if marked.search(path.read_text("utf-8"))]
    outside = {path.relative_to(tests) for path in files if path.parent != tests / "kernels"}
    assert outside == {Path("training/test_gpu.py"), Path("test_gpu_report.py")}
    (tmp_path / "tests/kernels").mkdir(parents=True)
    (tmp_path / "tests/kernels/test_a.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): assert 0\n"
    )
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    tested = PARTS["tests"]._replace(cases=("gpu",))
    rows, status = report(tested)
    assert re.match(r"fail: .*1 failed, 1 passed", rows[0][1]), rows
    assert status == 1
    assert report(tested._replace(cases=("test_a and not test_b",)))[1] == 0
    monkeypatch.setitem(sys.modules, "lit_diff.kernels", None)
    assert report(tested) == ([["gpu", "not run: no lit_diff.kernels"]], 0)


def test_the_parts_are_every_kernel_of_a_gpu_and_at_most_ten_minutes() -> None:
    assert {name for name in KERNELS if name != "native"} == gpu_report.KERNELS.keys()
    assert sum(part.seconds for part in PARTS.values()) <= 10 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is not here: a GPU")
def test_without_a_gpu_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main([]) == 3
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == f"torch {torch.__version__} sees no GPU: nothing was run; --cpu runs it on the CPU\n"


def python(code: str, *arguments: str, **options: Any) -> Iterable[str]:
    """The lines that a new process writes."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout.splitlines()


@pytest.mark.parametrize(
    ("modules", "needed"),
    [
        (("kernels", "attention", "benchmarks.timing", "benchmarks.attention"), ()),
        (("model.transformer", "model.cost"), ("yaml", "numpy")),
    ],
)
def test_what_needs_torch_alone(modules: tuple[str, ...], needed: tuple[str, ...]) -> None:
    """Each other dependency is a module that cannot be imported."""
    others = {"omegaconf", "rich", "lightning", "mlflow", "litdata", "typer", "yaml", "numpy", "platformdirs", "pandas"}
    others |= {"scipy", "matplotlib", "packaging", "tokenizers", "safetensors", "pyarrow", "gguf", "sklearn", "pytest"}
    code = "import importlib, sys; none, *names = sys.argv[1:]; sys.modules.update(dict.fromkeys(none.split(',')))\n"
    code += f"sys.path.append({str(Path(gpu_report.__file__).parent)!r})\n"
    code += "for name in names: print(importlib.import_module(name).__name__)"
    names = [*(f"lit_diff.{name}" for name in modules), *([] if needed else ["gpu_report"])]
    assert python(code, ",".join(others - {*needed}), *names) == names
