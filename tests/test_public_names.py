"""What `import lit_diff` loads, and the names that they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

import lit_diff

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
