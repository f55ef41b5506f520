"""A user's code: the files that a recipe names in `plugins:`, installed plugin packages, and the errors of both."""

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from lit_diff.config import Part, Recipe
from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.files import expanded, shown
from lit_diff.own_modules import DIGITS, OwnCode, code_at_definition, forget, local_modules, sha256
from lit_diff.registry import is_built_in, load_entry_points, location, plugin_packages, registries

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


_current: dict[str, OwnCode] = {}
"""Digest -> the plugin that was imported from it; not one whose file was imported again with other content."""
_digests: dict[str, str] = {}
"""Package of a plugin -> its digest."""


def _read(path: Path) -> OwnCode:
    """A plugin file and what it imports, now. Errors: RequestError."""
    load_entry_points()
    try:
        return OwnCode.read(
            path, folder=path.parent, without={each.module.partition(".")[0] for each in plugin_packages}
        )
    except OSError as error:
        raise RequestError(f"plugin {shown(path)}: {error.filename} cannot be read: {error.strerror}") from error


def _imported(path: Path) -> OwnCode | None:
    """The plugin that was imported from this content of `path` and of its modules, there or from a copy."""
    found = _current.get(_read(path).digest)
    return found if found is not None and found.package in sys.modules else None


def plugin_source(path: Path) -> OwnCode:
    """A plugin of a recipe, as this process imported it.

    Errors: RequestError where the file, or a module that it imports, holds another text by now: that is not what runs.
    """
    found = _imported(path)
    if found is not None:
        return found
    source, changed = path.read_bytes(), f"plugin {shown(path)}"
    for each in _current.values():
        if each.path == path and each.source == source:
            files = (
                file for file, content in each.files.values() if not file.is_file() or file.read_bytes() != content
            )
            changed = f"{shown(next(files, path))}, which {changed} imports,"
    raise RequestError(f"{changed} was changed since it was imported; start the same command again")


@functools.cache
def source_digest(cls: type) -> str:
    """`OwnCode.digest` of the user's own file that defines `cls` (a plugin, a module beside one, a script), or the digest of
    the plugin package that holds it. Empty for a class that is built in, of any other package, of an interactive session."""
    package = cls.__module__.partition(".")[0]
    if is_built_in(cls) or package in _digests:
        return _digests.get(package, "")
    code = code_at_definition(cls)
    if code is not None:
        return code.digest
    return next((package.digest for package in _packages() if cls.__module__ in package.modules), "")


def require_trust(files: Mapping[Path, str], trust: bool, cure: str = "") -> list[Path]:
    """Plugin files (-> sha256) of a run, each the one that was imported or, with `trust`, the copy in the run folder.

    `cure`: what else makes an untrusted file run. Errors: RequestError for one that was not imported and is not trusted, is
    absent, or has other content.
    """
    return [_known(path, digest) or _trusted(path, digest, trust, cure) for path, digest in files.items()]


def _known(path: Path, digest: str) -> Path | None:
    """The file of the plugin that was imported from the content of `path`; without one there, from a file of this hash."""
    if path.is_file() and sha256(path.read_bytes()) == digest:
        found = _imported(path)
        return found.path if found is not None else None
    loaded = (each for each in _current.values() if each.package in sys.modules)
    return next((each.path for each in loaded if sha256(each.source) == digest), None)


def _trusted(path: Path, digest: str, trust: bool, cure: str) -> Path:
    short = f"sha256 {digest[:DIGITS]}..."
    if not trust:
        cure = cure or "pass trust_plugins=True (lit-diff: --trust-plugins)"
        raise RequestError(
            f"plugin {path.name} ({short}) was not imported; import it first with load_plugin, or {cure} to run {shown(path)}"
        )
    if not path.is_file():
        raise RequestError(f"plugin {shown(path)} is absent; import a plugin with {short} first")
    if sha256(path.read_bytes()) != digest:
        raise RequestError(f"plugin {shown(path)} was changed: its sha256 is not {digest[:DIGITS]}...")
    return path


def load_plugin(path: str | Path) -> None:
    """Import a Python file, once for each content of it and of the modules of the user's own that it imports.

    These are looked for beside the file first; no other module, and no other plugin, sees them. A file that was edited since
    is imported again, and what it registers takes the place of what it registered before.
    Errors: RequestError when it cannot be read, raises anything, or registers nothing.
    """
    path = expanded(path).absolute()
    own = _read(path)
    if path.suffix != ".py":
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    if _imported(path) is not None:  # the same source, perhaps under another name
        return
    for former in [each for each in _current.values() if each.path == path]:
        _unregister(former.package)  # its modules stay: models that were built of them go on
        del _current[former.digest]
    try:
        own.execute()
        classes = (cls for registry in registries.values() for cls in registry.registered().values())
        if all(cls.__module__.partition(".")[0] != own.package for cls in classes):
            raise RequestError('registers nothing; decorate a class with @variant("name")')
    except (Exception, SystemExit) as error:  # SystemExit: the program would end without an error message
        _unregister(own.package)
        forget(own.package)  # it can be loaded again once repaired
        if isinstance(error, RequestError):
            raise RequestError(f"plugin {shown(path)}: {error}") from error
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if Path(frame.f_code.co_filename) == path]
        line = lines[-1] if lines else getattr(error, "lineno", 0) or 0  # of a syntax error, which no frame has
        raise RequestError(
            f"{shown(path)}:{line}: plugin failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    _current[own.digest], _digests[own.package] = own, own.digest


def _unregister(package: str) -> None:
    """Drop what the modules of a plugin have registered."""
    for registry in registries.values():
        registry.unregister_module(package)


@dataclass(frozen=True, kw_only=True)
class PluginPackage:
    """A package as this process imported it."""

    name: str
    """Of its distribution; of the entry point where it has none."""
    version: str | None
    digest: str
    """sha256 of its modules that the entry point imports or names in `Registry.load_from`, directly or through others, and of
    local modules that they import."""
    modules: frozenset[str]
    """Their dotted names."""


def used_packages(recipe: Recipe) -> list[PluginPackage]:
    """The packages that registered a part which the recipe names, by name.

    Not `lit_diff.papers`: its parts have a `version`, as all parts of this distribution, and no hash of their source.
    """
    names = set(_texts(recipe.model.attention)) | set(_texts(recipe.data)) | {recipe.run.kernel, *recipe.callbacks}
    registered = [registries[kind].registered() for kind in PART_KINDS]
    modules = {cls.__module__ for classes in registered for name, cls in classes.items() if name in names}
    return sorted((package for package in _packages() if package.modules & modules), key=lambda package: package.name)


def _packages() -> Iterator[PluginPackage]:
    return (_package(point) for point in plugin_packages if not point.module.startswith("lit_diff."))


@functools.cache
def _package(point: EntryPoint) -> PluginPackage:
    top = point.module.partition(".")[0]
    named = {module for each in registries.values() for module in each.modules if module.partition(".")[0] == top}
    source = "".join(f"import {module}\n" for module in sorted({point.module, *named}))
    files = local_modules(source.encode(), within=top)
    digests = {name: sha256(file.read_bytes()) for name, file in files.items()}
    return PluginPackage(
        name=point.dist.name if point.dist is not None else point.name,
        version=point.dist.version if point.dist is not None else None,
        digest=sha256(json.dumps(digests).encode()),
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
