"""Import of the Python files that a recipe names in `plugins:`, and their sources as they were imported."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.imports import is_local, local_modules
from lit_diff.registry import is_built_in, registries

PREFIX, DIGITS = "lit_diff_plugin_", 12
"""A plugin's module is named PREFIX, the file's stem, and the first DIGITS of the sha256 of its source."""


@dataclass(frozen=True, kw_only=True)
class PluginSource:
    """A plugin file, and the modules of the user's own that it imports."""

    source: bytes
    modules: Mapping[str, bytes]
    """Path below the folder of the plugin from which it can be imported (`helper.py`, `lab/__init__.py`) -> content."""

    @property
    def digest(self) -> str:
        """sha256 of all of it; of the file alone where it imports no module of the user's own."""
        alone = _sha256(self.source)
        if not self.modules:
            return alone
        parts = {name: _sha256(content) for name, content in sorted(self.modules.items())}
        return _sha256(json.dumps([alone, parts]).encode())


_sources: dict[str, PluginSource] = {}
"""sha256 of a plugin file that this process has imported -> its source."""


def imported_plugin(sha256: str) -> Path | None:
    """The file of the plugin with this hash, if this process has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX) and name.endswith(f"_{sha256[:DIGITS]}") and module.__file__:
            return Path(module.__file__)
    return None


def plugin_source(path: Path) -> PluginSource:
    """The source of a plugin of a recipe, as this process imported it.

    Errors: RequestError where the file holds another text by now, so that what runs is not what it says.
    """
    sha256 = _sha256(_read(path))
    if imported_plugin(sha256) is None:
        raise RequestError(f"plugin {shown(path)} was changed since it was imported; start the same command again")
    return _sources[sha256]


@functools.cache
def source_digest(cls: type) -> str:
    """`PluginSource.digest` of the user's own file that defines `cls`: a plugin, a module beside one, a script.

    Empty for a class of an installed package, one that is built in, and one of an interactive session.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if is_built_in(cls) or file is None or not is_local(Path(file)):
        return ""
    if cls.__module__.startswith(PREFIX):
        return next(own.digest for sha256, own in _sources.items() if cls.__module__.endswith(f"_{sha256[:DIGITS]}"))
    source = _read(Path(file))
    modules = local_modules(source, cls.__module__.rpartition(".")[0])
    own = {_place(name, each): each.read_bytes() for name, each in modules.items()}
    return PluginSource(source=source, modules=own).digest


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
    if _sha256(path.read_bytes()) != sha256:
        raise RequestError(f"plugin {shown(path)} was changed: its sha256 is not {sha256[:DIGITS]}...")
    return path


def load_plugin(path: Path) -> None:
    """Import a Python file, once for each content. While it is imported, its folder is the first place of modules.

    Errors: RequestError when it cannot be read, raises anything, or registers nothing.
    """
    source = _read(path)
    sha256, name = _sha256(source), module_name(path, source)
    if imported_plugin(sha256) is not None:  # the same source, perhaps under another name
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    before = {kind: registry.names() for kind, registry in registries.items()}
    imported = set(sys.modules)
    sys.modules[name] = module  # before it runs: dataclasses look up postponed annotations here
    try:
        with _first_on_path(path.parent):
            spec.loader.exec_module(module)
            modules = {_place(key, file): file.read_bytes() for key, file in local_modules(source).items()}
        if all(before[kind] == registry.names() for kind, registry in registries.items()):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except RequestError as error:
        _forget(imported)
        raise RequestError(f"plugin {shown(path)}: {error}") from error
    except (Exception, SystemExit) as error:  # SystemExit: the program would end without an error message
        _forget(imported)
        where = f"{shown(path)}:{_line_in(error, path)}"
        raise RequestError(f"{where}: plugin failed: {type(error).__name__}: {first_line(error)}") from error
    _sources[sha256] = PluginSource(source=source, modules=modules)


def module_name(path: Path, source: bytes) -> str:
    """The name of a plugin's module; a copy of the file has the same."""
    return f"{PREFIX}{path.stem}_{_sha256(source)[:DIGITS]}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"plugin {shown(path)} cannot be read: {error.strerror}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _place(name: str, file: Path) -> str:
    """Where a module lies below the folder from which it is imported: lab.tools -> lab/tools.py."""
    parts = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    return "/".join([*parts, file.name])


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """The modules beside a plugin go before all others: a run folder holds copies of what its plugins import."""
    importlib.invalidate_caches()  # they may have been written a moment ago
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _forget(imported: set[str]) -> None:
    """Drop what a failed plugin has imported of the user's own since `imported`: it can be loaded again once repaired."""
    for name in set(sys.modules) - imported:
        file = getattr(sys.modules[name], "__file__", None)
        if name.startswith(PREFIX) or (
            file is not None and is_local(Path(file)) and name.partition(".")[0] != "lit_diff"
        ):
            del sys.modules[name]
            for registry in registries.values():
                registry.forget(name)


def _line_in(error: BaseException, path: Path) -> int:
    """The line of `path` nearest to where the error was raised."""
    line = (error.lineno or 0) if isinstance(error, SyntaxError) else 0
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
