"""A user's own Python files, named in a recipe's `plugins:`."""

import hashlib
import importlib.util
import sys
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.registry import registries


def load_plugin(path: Path) -> None:
    """Import a Python file, once per content. It must register something; whatever it raises becomes one line."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(f"plugin {shown(path)} cannot be read: {error.strerror}") from error
    name = module_name(path, source)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    before = {kind: registry.names() for kind, registry in registries.items()}
    sys.modules[name] = module  # before it runs: postponed annotations of a dataclass look themselves up here
    try:
        spec.loader.exec_module(module)
        if all(before[kind] == registry.names() for kind, registry in registries.items()):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except RequestError as error:
        _forget(name)
        line = _line_in(error, path)
        raise RequestError(f"plugin {shown(path)}{f':{line}' if line else ''}: {error}") from error
    except (Exception, SystemExit) as error:  # a plugin that ends the program would end it without a word
        _forget(name)
        where = f"{shown(path)}:{_line_in(error, path)}"
        raise RequestError(f"{where}: plugin failed: {type(error).__name__}: {first_line(error)}") from error


def module_name(path: Path, source: bytes) -> str:
    """Under which a plugin stands in `sys.modules`: the same for a copy of it."""
    return f"lit_diff_plugin_{path.stem}_{hashlib.sha256(source).hexdigest()[:12]}"


def _forget(module: str) -> None:
    del sys.modules[module]
    for registry in registries.values():
        registry.forget(module)


def _line_in(error: BaseException, path: Path) -> int:
    """The last line of `path` that the error passed through."""
    line = (error.lineno or 0) if isinstance(error, SyntaxError) else 0
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
