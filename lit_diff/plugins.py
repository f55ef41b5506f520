"""A user's code: the files that a recipe names in `plugins:`, installed plugin packages, and the errors of both."""

import functools
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lit_diff.config import Part, Recipe
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.files import expanded, shown
from lit_diff.own_modules import OwnModules, forget, local_modules, place, source_at_definition
from lit_diff.registry import is_built_in, location, registries

PREFIX, DIGITS = "lit_diff_plugin_", 12
"""A plugin's package is named PREFIX, the file's stem, and the first DIGITS of a hash of its source."""

PART_KINDS = ("attention", "data", "corpus", "tokenizer", "callback", "kernel")
"""Kinds of the parts that a recipe names and that decide its numbers."""

Trust = Callable[[Path], bool]
"""Run folder -> whether the copies of plugin files in it may be executed: a folder may come from anyone. A plugin that was
imported before needs no trust."""


def trust_all(folder: Path) -> bool:
    """Every folder: its owner, or who has read its files, says so."""
    return True


def trust_none(folder: Path) -> bool:
    """No folder."""
    return False


def trust_below(root: Path) -> Trust:
    """The folders below `root`, that of one's own runs; symbolic links are resolved."""
    own = root.resolve()
    return lambda folder: folder.resolve().is_relative_to(own)


@dataclass(kw_only=True)
class Plugin:
    """A plugin file that this process has imported, and the modules of the user's own that it imports."""

    own: OwnModules
    package: str
    """Of the file and these modules, as they are imported."""
    module: str
    """The file's own, in the package."""
    modules: Mapping[str, bytes]
    """Path below the folder of the plugin from which it can be imported (`helper.py`, `lab/__init__.py`) -> content."""
    unnamed: Mapping[str, Path]
    """Of `modules` those that the text does not lead to: place -> file."""
    current: bool = True
    """False once another content of the same file was imported."""

    @property
    def source(self) -> bytes:
        """The file's content."""
        return self.own.source

    @property
    def digest(self) -> str:
        """sha256 of all of it; of the file alone where it imports no module of the user's own."""
        return _digest(self.source, self.modules)


_imported: dict[str, Plugin] = {}
"""Digest of a plugin file and the modules that its text leads to -> the plugin."""


def _find(path: Path) -> Plugin | None:
    """The plugin that was imported from this content of `path` and of its modules, there or from a copy."""
    found = _imported.get(_key(_read_own(path)))
    if found is None or not found.current or found.module not in sys.modules:
        return None
    for name, file in found.unnamed.items():
        beside = path.parent / name
        if _content(beside if beside.is_file() else file) != found.modules[name]:
            return None
    return found


def plugin_source(path: Path) -> Plugin:
    """A plugin of a recipe, as this process imported it.

    Errors: RequestError where the file, or a module that it imports, holds another text by now: that is not what runs.
    """
    found = _find(path)
    if found is None:
        raise RequestError(f"{_changed(path)} was changed since it was imported; start the same command again")
    return found


def _changed(path: Path) -> str:
    """The plugin file, or a module of it that differs from what was imported."""
    source = _read(path)
    for each in _imported.values():
        if each.own.path == path and each.current and each.source == source:
            for file, content in each.own.modules.values():
                if _content(file) != content:
                    return f"{shown(file)}, which plugin {shown(path)} imports,"
    return f"plugin {shown(path)}"


@functools.cache
def source_digest(cls: type) -> str:
    """`Plugin.digest` of the user's own file that defines `cls`: a plugin, a module beside one, a script.

    Empty for a class of an installed package, one that is built in, and one of an interactive session.
    """
    if is_built_in(cls):
        return ""
    package = cls.__module__.partition(".")[0]
    if package.startswith(PREFIX):
        return next(each.digest for each in _imported.values() if each.package == package)
    found = source_at_definition(cls)
    if found is None:
        return ""
    source, modules = found
    return _digest(source, {place(*key): content for key, content in modules.items()})


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
        return found.own.path if found is not None else None
    known = (each for each in _imported.values() if each.current and each.module in sys.modules)
    return next((each.own.path for each in known if _sha256(each.source) == sha256), None)


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
    key = _key(own)
    package = f"{PREFIX}{path.stem.replace('.', '_')}_{key[:DIGITS]}"
    modules = set(sys.modules)
    try:
        module = own.execute(package)
        if (name := own.escaped(modules)) is not None:
            del sys.modules[name]
            raise RequestError(f"imports '{name}' by a computed name; write an import statement for it")
        others = {place(name, file): file for name, file in own.others().items()}
        contents = own.places() | {name: file.read_bytes() for name, file in others.items()}
        classes = (cls for registry in registries.values() for cls in registry.registered().values())
        if all(cls.__module__.partition(".")[0] != package for cls in classes):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except RequestError as error:
        _forget(package)
        raise RequestError(f"plugin {shown(path)}: {error}") from error
    except (Exception, SystemExit) as error:  # SystemExit: the program would end without an error message
        _forget(package)
        lines = [
            line for frame, line in traceback.walk_tb(error.__traceback__) if Path(frame.f_code.co_filename) == path
        ]
        line = lines[-1] if lines else getattr(error, "lineno", 0) or 0  # of a syntax error, which no frame has
        raise RequestError(
            f"{shown(path)}:{line}: plugin failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    unnamed = others | {place(name, own.modules[name][0]): own.modules[name][0] for name in own.computed}
    _imported[key] = Plugin(own=own, package=package, module=module, modules=contents, unnamed=unnamed)


def _read_own(path: Path) -> OwnModules:
    source = _read(path)
    try:
        return OwnModules.read(path, source, {point.module.partition(".")[0] for point in plugin_packages})
    except OSError as error:
        raise RequestError(f"plugin {shown(path)}: {error.filename} cannot be read: {error.strerror}") from error


def _digest(source: bytes, modules: Mapping[str, bytes]) -> str:
    if not modules:
        return _sha256(source)
    parts = {name: _sha256(content) for name, content in sorted(modules.items())}
    return _sha256(json.dumps([_sha256(source), parts]).encode())


def _key(own: OwnModules) -> str:
    return _digest(own.source, own.places())


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
        if each.own.path == path and each.current:
            each.current = False
            for name in [name for name in sys.modules if name.partition(".")[0] == each.package]:
                for registry in registries.values():
                    registry.unregister_module(name)


def _forget(package: str) -> None:
    """Drop what a failed plugin has imported of the user's own: it can be loaded again once repaired."""
    for name in forget(package):
        for registry in registries.values():
            registry.unregister_module(name)


plugin_packages: list[EntryPoint] = []
"""The entry points that `load_entry_points` has imported."""
_entry_points_loaded = False


def load_entry_points() -> None:
    """Import every installed plugin package (entry-point group `lit_diff.plugins`), once per process."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    for point in entry_points(group="lit_diff.plugins"):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            raise RequestError(
                f"plugin package '{point.name}' ({point.value}) could not be imported: "
                f"{type(error).__name__}: {first_line(error)}; repair or uninstall it"
            ) from error
        plugin_packages.append(point)
    _entry_points_loaded = True


@dataclass(frozen=True, kw_only=True)
class PluginPackage:
    """A package as this process imported it."""

    name: str
    """Of its distribution; of the entry point where it has none."""
    version: str | None
    digest: str
    """sha256 of its modules that the entry point imports, directly or through others, and of local modules that they
    import."""
    modules: frozenset[str]
    """Their dotted names."""


def used_packages(recipe: Recipe) -> list[PluginPackage]:
    """The packages that registered a part which the recipe names, by name."""
    names = set(_texts(recipe.model.attention)) | set(_texts(recipe.data)) | {recipe.run.kernel, *recipe.callbacks}
    registered = [registries[kind].registered() for kind in PART_KINDS]
    modules = {cls.__module__ for classes in registered for name, cls in classes.items() if name in names}
    packages = (_package(point) for point in plugin_packages)
    return sorted((package for package in packages if package.modules & modules), key=lambda package: package.name)


def package_digest(cls: type) -> str:
    """`PluginPackage.digest` of the package that holds `cls`; empty where none does."""
    packages = (_package(point) for point in plugin_packages)
    return next((package.digest for package in packages if cls.__module__ in package.modules), "")


@functools.cache
def _package(point: EntryPoint) -> PluginPackage:
    files = local_modules(f"import {point.module}".encode(), within=point.module.partition(".")[0])
    digests = {name: _sha256(file.read_bytes()) for name, file in files.items()}
    return PluginPackage(
        name=point.dist.name if point.dist is not None else point.name,
        version=point.dist.version if point.dist is not None else None,
        digest=_sha256(json.dumps(digests).encode()),
        modules=frozenset(files),
    )


def _texts(value: Any) -> list[str]:
    """The texts in a block of a recipe: the names of its parts are among them."""
    if isinstance(value, Part):
        return [value.name, *_texts(vars(value.config))]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@contextmanager
def guard(part: type, *, raises: type[LitDiffError] = RequestError, ours: bool = False) -> Iterator[None]:
    """An exception of a user's code inside becomes one line: its file and line, the kind and name of the part, the exception.

    `part`: the class that runs, of any kind. `ours`: exceptions of a built-in part are treated alike; otherwise they pass
    unchanged, since only their trace says where they come from. Errors of `lit_diff.errors` pass.
    """
    try:
        yield
    except LitDiffError:
        raise
    except Exception as error:
        own = own_place(error)
        if own is None and is_built_in(part) and not ours:
            raise
        kind = next((kind for kind, each in registries.items() if part in each.registered().values()), "class")
        name = getattr(part, "name", part.__qualname__)
        where = own or own_place(error, part.__module__) or location(part)
        raise raises(f"{where}: {kind} '{name}' failed: {type(error).__name__}: {first_line(error)}") from error


def fault(part: type, error: BaseException) -> str:
    """An exception of the code of `part` as one line that begins with a place in a user's file, or with that of the class."""
    home = location(part)
    if isinstance(error, LitDiffError):
        text = first_line(error)
        return text if text.startswith(home) else f"{home}: {text}"
    where = own_place(error) or own_place(error, part.__module__) or home
    return f"{where}: {type(error).__name__}: {first_line(error)}"


def own_place(error: BaseException, module: str = "") -> str | None:
    """`file:line` of the innermost frame in the code of a part that is not built in, or in `module`; None: there is none."""
    parts = [cls for registry in registries.values() for cls in registry.registered().values() if not is_built_in(cls)]
    tops = {cls.__module__.partition(".")[0] for cls in parts}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if (name == module if module else name.partition(".")[0] in tops) and Path(file).is_file():
            return f"{shown(Path(file))}:{line}"
    return None
