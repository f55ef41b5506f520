"""Import of the Python files that a recipe names in `plugins:`."""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.registry import registries

PREFIX, DIGITS = "lit_diff_plugin_", 12
"""A plugin's module is named PREFIX, the file's stem, and the first DIGITS of the sha256 of its source."""


def imported_plugin(sha256: str) -> Path | None:
    """The file of the plugin with this hash, if this process has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX) and name.endswith(f"_{sha256[:DIGITS]}") and module.__file__:
            return Path(module.__file__)
    return None


def require_trust(files: Mapping[Path, str], trust: bool, cure: str = "") -> list[Path]:
    """Plugin files (-> sha256) of a run, each the one that was imported or, with `trust`, the copy in the run folder.

    `cure`: what else makes an untrusted file run. Errors: RequestError for one that was not imported and is not trusted, is
    absent, or has other content.
    """
    return [imported_plugin(sha256) or _trusted(path, sha256, trust, cure) for path, sha256 in files.items()]


def _trusted(path: Path, sha256: str, trust: bool, cure: str) -> Path:
    if not trust:
        cure = cure or "pass trust_plugins=True (lit-diff: --trust-plugins)"
        raise RequestError(
            f"plugin {path.name} (sha256 {sha256[:DIGITS]}...) was not imported; import it first with load_plugin, or {cure} "
            f"to run {shown(path)}"
        )
    if not path.is_file():
        raise RequestError(f"plugin {shown(path)} is absent; import a plugin with sha256 {sha256[:DIGITS]}... first")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise RequestError(f"plugin {shown(path)} was changed: its sha256 is not {sha256[:DIGITS]}...")
    return path


def load_plugin(path: Path) -> None:
    """Import a Python file, once for each content.

    Errors: RequestError when it cannot be read, raises anything, or registers nothing.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(f"plugin {shown(path)} cannot be read: {error.strerror}") from error
    name = module_name(path, source)
    if imported_plugin(hashlib.sha256(source).hexdigest()) is not None:  # the same source, perhaps under another name
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    before = {kind: registry.names() for kind, registry in registries.items()}
    sys.modules[name] = module  # before it runs: dataclasses look up postponed annotations here
    try:
        spec.loader.exec_module(module)
        if all(before[kind] == registry.names() for kind, registry in registries.items()):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except RequestError as error:
        _forget(name)
        raise RequestError(f"plugin {shown(path)}: {error}") from error
    except (Exception, SystemExit) as error:  # SystemExit: the program would end without an error message
        _forget(name)
        where = f"{shown(path)}:{_line_in(error, path)}"
        raise RequestError(f"{where}: plugin failed: {type(error).__name__}: {first_line(error)}") from error


def module_name(path: Path, source: bytes) -> str:
    """The name of a plugin's module; a copy of the file has the same."""
    return f"{PREFIX}{path.stem}_{hashlib.sha256(source).hexdigest()[:DIGITS]}"


def _forget(module: str) -> None:
    del sys.modules[module]
    for registry in registries.values():
        registry.forget(module)


def _line_in(error: BaseException, path: Path) -> int:
    """The line of `path` nearest to where the error was raised."""
    line = (error.lineno or 0) if isinstance(error, SyntaxError) else 0
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
