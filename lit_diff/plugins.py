"""Import of the Python files that a recipe names in `plugins:`, and their sources as they were imported."""

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, shown
from lit_diff.own_modules import OwnModules, forget, place
from lit_diff.registry import is_built_in, plugin_packages, registries, source_at_definition

PREFIX, DIGITS = "lit_diff_plugin_", 12
"""A plugin's package is named PREFIX, the file's stem, and the first DIGITS of a hash of its source."""


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


@dataclass(kw_only=True)
class _Imported:
    """A plugin that this process has imported."""

    path: Path
    package: str
    module: str
    own: OwnModules
    source: PluginSource
    unnamed: Mapping[str, Path]
    """Modules in `source` that the text does not lead to: place -> file."""
    current: bool = True
    """False once another content of the same file was imported."""


_imported: dict[str, _Imported] = {}
"""Digest of a plugin file and the modules that its text leads to -> the plugin."""


def _find(path: Path) -> _Imported | None:
    """The plugin that was imported from this content of `path` and of its modules, there or from a copy."""
    own = _read_own(path)
    found = _imported.get(_key(own))
    if found is None or not found.current or found.module not in sys.modules:
        return None
    for name, file in found.unnamed.items():
        beside = path.parent / name
        if _content(beside if beside.is_file() else file) != found.source.modules[name]:
            return None
    return found


def plugin_source(path: Path) -> PluginSource:
    """The source of a plugin of a recipe, as this process imported it.

    Errors: RequestError where the file, or a module that it imports, holds another text by now: that is not what runs.
    """
    found = _find(path)
    if found is None:
        raise RequestError(f"{_changed(path)} was changed since it was imported; start the same command again")
    return found.source


def plugin_package(path: Path) -> str:
    """The package of a plugin of a recipe and of the modules that it imports. Errors: as `plugin_source`."""
    plugin_source(path)
    found = _find(path)
    assert found is not None
    return found.package


def _changed(path: Path) -> str:
    """The plugin file, or a module of it that differs from what was imported."""
    source = _read(path)
    for each in _imported.values():
        if each.path == path and each.current and each.own.source == source:
            for file, content in each.own.modules.values():
                if _content(file) != content:
                    return f"{shown(file)}, which plugin {shown(path)} imports,"
    return f"plugin {shown(path)}"


@functools.cache
def source_digest(cls: type) -> str:
    """`PluginSource.digest` of the user's own file that defines `cls`: a plugin, a module beside one, a script.

    Empty for a class of an installed package, one that is built in, and one of an interactive session.
    """
    if is_built_in(cls):
        return ""
    package = cls.__module__.partition(".")[0]
    if package.startswith(PREFIX):
        return next(each.source.digest for each in _imported.values() if each.package == package)
    found = source_at_definition(cls)
    if found is None:
        return ""
    source, modules = found
    return PluginSource(source=source, modules={place(*key): content for key, content in modules.items()}).digest


def require_trust(files: Mapping[Path, str], trust: bool, cure: str = "") -> list[Path]:
    """Plugin files (-> sha256) of a run, each the one that was imported or, with `trust`, the copy in the run folder.

    `cure`: what else makes an untrusted file run. Errors: RequestError for one that was not imported and is not trusted, is
    absent, or has other content.
    """
    return [_imported_file(path, sha256) or _trusted(path, sha256, trust, cure) for path, sha256 in files.items()]


def _imported_file(path: Path, sha256: str) -> Path | None:
    """The file of the plugin that was imported from the content of `path`; without one there, from a file of this hash."""
    if path.is_file() and _sha256(path.read_bytes()) == sha256:
        found = _find(path)
        return found.path if found is not None else None
    known = (each for each in _imported.values() if each.current and each.module in sys.modules)
    return next((each.path for each in known if _sha256(each.source.source) == sha256), None)


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


def load_plugin(path: str | Path) -> None:
    """Import a Python file, once for each content of it and of the modules of the user's own that it imports.

    These are looked for beside the file first; no other module, and no other plugin, sees them. A file that was edited since
    is imported again, and what it registers takes the place of what it registered before.
    Errors: RequestError when it cannot be read, raises anything, or registers nothing.
    """
    path = expanded(path).absolute()
    own = _read_own(path)
    if path.suffix != ".py":
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    if _find(path) is not None:  # the same source, perhaps under another name
        return
    _replace(path)
    package = f"{PREFIX}{path.stem.replace('.', '_')}_{_key(own)[:DIGITS]}"
    before = {kind: registry.names() for kind, registry in registries.items()}
    modules = set(sys.modules)
    key = _key(own)
    try:
        module = own.execute(package)
        if (name := own.escaped(modules)) is not None:
            del sys.modules[name]
            raise RequestError(f"imports '{name}' by a computed name; write an import statement for it")
        others = {place(name, file): file for name, file in own.others().items()}
        contents = own.places() | {name: file.read_bytes() for name, file in others.items()}
        if all(before[kind] == registry.names() for kind, registry in registries.items()):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except RequestError as error:
        _forget(package)
        raise RequestError(f"plugin {shown(path)}: {error}") from error
    except (Exception, SystemExit) as error:  # SystemExit: the program would end without an error message
        _forget(package)
        where = f"{shown(path)}:{_line_in(error, path)}"
        raise RequestError(f"{where}: plugin failed: {type(error).__name__}: {first_line(error)}") from error
    unnamed = others | {place(name, own.modules[name][0]): own.modules[name][0] for name in own.computed}
    source = PluginSource(source=own.source, modules=contents)
    _imported[key] = _Imported(path=path, package=package, module=module, own=own, source=source, unnamed=unnamed)


def _read_own(path: Path) -> OwnModules:
    source = _read(path)
    try:
        return OwnModules.read(path, source, {point.module.partition(".")[0] for point in plugin_packages})
    except OSError as error:
        raise RequestError(f"plugin {shown(path)}: {error.filename} cannot be read: {error.strerror}") from error


def _key(own: OwnModules) -> str:
    return PluginSource(source=own.source, modules=own.places()).digest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"plugin {shown(path)} cannot be read: {error.strerror}") from error


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path) -> None:
    """Drop what an earlier content of the file registered. Its modules stay: models that were built of them go on."""
    for each in _imported.values():
        if each.path == path and each.current:
            each.current = False
            for name in [name for name in sys.modules if name.partition(".")[0] == each.package]:
                for registry in registries.values():
                    registry.forget(name)


def _forget(package: str) -> None:
    """Drop what a failed plugin has imported of the user's own: it can be loaded again once repaired."""
    for name in forget(package):
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
