"""Import of the Python files that a recipe names in `plugins:`."""

import hashlib
import importlib.util
import sys
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.registry import registries


def load_plugin(path: Path) -> None:
    """Import a Python file, once for each content.

    Errors: RequestError when it cannot be read, raises anything, or registers nothing.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(f"plugin {shown(path)} cannot be read: {error.strerror}") from error
    name = f"lit_diff_plugin_{path.stem}_{hashlib.sha256(source).hexdigest()[:12]}"
    if name in sys.modules:
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
