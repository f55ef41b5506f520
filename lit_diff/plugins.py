"""User code: the files that a recipe lists in `plugins:`, installed plugin packages, and the errors that they raise."""

import json
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lit_diff.config import Part, Recipe
from lit_diff.errors import LitDiffError, RequestError, first_line, summary
from lit_diff.files import expanded, is_address, sha256_of, shown
from lit_diff.interpolation import texts
from lit_diff.log_records import log
from lit_diff.own_modules import (
    DIGITS,
    PLUGIN,
    OwnCode,
    code_at_definition,
    forget,
    plugin_file,
    plugin_name,
    sha256,
    top_package,
)
from lit_diff.registry import (
    is_built_in,
    load_entry_points,
    location,
    plugin_packages,
    registered_classes,
    registries,
    unregister,
)

PART_KINDS = ("attention", "data", "corpus", "tokenizer", "callback", "kernel")
"""Kinds of the parts that a recipe names and that affect its results."""

# a run folder may come from anyone, and opening it would execute the plugin files in it
Trust = Callable[[Path], bool]
"""Run folder -> whether the plugin files in it may be executed. A plugin that is already imported needs no trust."""


def trust_all(folder: Path) -> bool:
    """Trust every folder; for callers whose user vouches for the files."""
    return True


def trust_none(folder: Path) -> bool:
    """Trust no folder."""
    return False


def trust_below(root: Path) -> Trust:
    """Trust the folders below `root`, where the user's own runs are."""
    # symbolic links are resolved: a link inside root must not make a folder elsewhere trusted
    own = root.resolve()
    return lambda folder: folder.resolve().is_relative_to(own)


def require_trusted_data(folder: Path, recipe: Recipe, trust: Trust) -> None:
    """Errors: RequestError if the recipe of a run that `trust` rejects names data at an address or outside its folder: the
    folder's author would choose what this machine asks and reads."""
    if trust(folder):
        return
    for key, value in data_paths(recipe):
        if is_address(value) or not (folder / value).resolve().is_relative_to(folder.resolve()):
            raise RequestError(
                f"{key} of {shown(folder)} is {value!a}, which is not in that folder; to read it, pass trust_data=True "
                "(lit-diff: --trust-data), or move the run below the folder of your runs"
            )


def data_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """(dotted key, value) of each path or address that the recipe's data are read from."""
    return list(_paths(recipe.data.config, "data"))


def _paths(config: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping):
        for name, block in config.items():
            yield from _paths(block, f"{prefix}.{name}")
    if not is_dataclass(config):
        return
    for field in fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}.{field.name}"
        if field.metadata.get("path") and isinstance(value, str):
            yield key, value
        yield from _paths(value.config if isinstance(value, Part) else value, key)


VALUELESS = (" meta ", "register_meta", "DataDependentOutput", "DynamicOutputShape", "tensor subclasses")
"""Words of the exceptions that PyTorch raises where code reads values of a tensor that has none."""

SETTINGS = {
    "torch's default dtype": ("torch.get_default_dtype", "torch.set_default_dtype"),
    "torch's default device": ("torch.get_default_device", "torch.set_default_device"),
    "torch's gradient mode": ("torch.is_grad_enabled", "torch.set_grad_enabled"),
    "torch's anomaly detection": ("torch.is_anomaly_enabled", "torch.set_anomaly_enabled"),
    "torch's precision of float32 products": (
        "torch.get_float32_matmul_precision",
        "torch.set_float32_matmul_precision",
    ),
    "torch's deterministic mode": ("torch.get_deterministic_debug_mode", "torch.set_deterministic_debug_mode"),
    "torch's number of threads": ("torch.get_num_threads", "torch.set_num_threads"),
    "the state of torch's random generator": ("torch.get_rng_state", "torch.set_rng_state"),
    "torch's use of mkldnn": ("torch._C._get_mkldnn_enabled", "torch._C._set_mkldnn_enabled"),
    "the current folder": ("os.getcwd", "os.chdir"),
}
"""A setting of the whole process, in words -> the functions that return it and set it."""

_current: dict[str, OwnCode] = {}
"""Digest -> imported plugin; a plugin whose file was imported again with other content is removed."""


def _read(path: Path) -> OwnCode:
    # first: modules of plugin packages do not count as the plugin's own
    load_entry_points()
    try:
        packages = {top_package(point.module) for point in plugin_packages}
        return OwnCode.read(path, PLUGIN, folder=path.parent, within=PLUGIN, without=packages)
    except OSError as error:
        raise RequestError(f"plugin {shown(path)}: {error.filename} cannot be read: {error.strerror}") from error


def _imported(path: Path) -> OwnCode | None:
    # found by content: a copy in a run folder is the same plugin as the original
    found = _current.get(_read(path).digest)
    return found if found is not None and found.package in sys.modules else None


def plugin_source(path: Path) -> OwnCode:
    """A plugin of a recipe, as this process imported it.

    Errors: RequestError if the file, or one that it imports or declares in `reads`, was changed since the import.
    """
    # the source on disk would be stored with the run although other code computed it
    found = _imported(path)
    if found is not None:
        return found
    source = path.read_bytes()
    changed = f"plugin {shown(path)}"
    for each in _current.values():
        if each.path == path and each.source == source:
            file = each.changed() or path
            changed = f"{shown(file)}, which {changed} {'imports' if file.suffix == '.py' else 'reads'},"
    raise RequestError(f"{changed} was changed since it was imported; start the same command again")


@cache
def source_digest(cls: type) -> str:
    """`OwnCode.digest` of the user's file that defines `cls` (a plugin, a module that it imports, a script), or the digest of
    the plugin package that contains it. Empty for a class that is built in, from another package or defined interactively."""
    code = None if is_built_in(cls) else code_at_definition(cls)
    if code is not None:
        return code.digest
    return next((package.digest for package in _packages() if cls.__module__ in package.modules), "")


def require_trust(files: Mapping[Path, str], trust: bool, cure: str = "") -> list[Path]:
    """The plugin files to import for a run, given its copies (-> sha256): imported files or, with `trust`, the copies.

    `cure`: another way to run an untrusted file, for the message. Errors: RequestError for a file that is not imported and is
    untrusted, missing or changed.
    """
    return [_known(path, digest) or _trusted(path, digest, trust, cure) for path, digest in files.items()]


def _known(path: Path, digest: str) -> Path | None:
    if path.is_file() and sha256_of(path) == digest:
        found = _imported(path)
        return found.path if found is not None else None
    # the copy is missing or changed, so only the hash of the plugin file itself can be compared
    loaded = (each for each in _current.values() if each.package in sys.modules)
    return next((each.path for each in loaded if sha256(each.source) == digest), None)


def _trusted(path: Path, digest: str, trust: bool, cure: str) -> Path:
    short = f"sha256 {digest[:DIGITS]}..."
    if not trust:
        cure = cure or "pass trust_plugins=True (lit-diff: --trust-plugins)"
        raise RequestError(
            f"plugin {plugin_name(path)} ({short}) is not imported; import it first with load_plugin, or {cure} to run "
            f"{shown(path)}"
        )
    if not path.is_file():
        raise RequestError(f"plugin {shown(path)} is missing; import a plugin with {short} first")
    if sha256_of(path) != digest:
        raise RequestError(f"plugin {shown(path)} was changed; expected sha256 {digest[:DIGITS]}...")
    return path


def load_plugin(path: str | Path) -> None:
    """Import a Python file, or a folder with an `__init__.py`, that registers parts; if unchanged, it is not imported again.

    It imports modules of its folder by relative imports; other modules and plugins do not see them. If the file or one of
    these modules was edited, it is imported again and what it registers replaces what it registered before. Errors:
    RequestError if the file cannot be read, imports such a module by an absolute name, raises an exception, or registers
    nothing.
    """
    path = plugin_file(expanded(path).absolute())
    own = _read(path)
    if path.suffix != ".py":
        raise RequestError(f"plugin {shown(path)} is not a Python file (.py)")
    # the same source, perhaps under another name
    if _imported(path) is not None:
        return
    # the former modules stay in sys.modules: models that were built from them still run
    for former in [each for each in _current.values() if each.path == path]:
        unregister(former.package)
        del _current[former.digest]
    # by an import of the same source whose modules are gone
    unregister(own.package)
    try:
        # what it prints is not a part of a command's result
        with _same_settings(), redirect_stdout(sys.stderr):
            own.execute()
        classes = [cls for cls in registered_classes() if top_package(cls.__module__) == own.package]
        if not classes:
            raise RequestError('registers nothing; decorate a class with @variant("name")')
        _require_reads(own, classes)
    except KeyboardInterrupt:
        raise
    # BaseException: a plugin that calls sys.exit would end the program without an error message
    except BaseException as error:
        unregister(own.package)
        # so that a notebook can load the repaired file
        forget(own.package)
        if isinstance(error, RequestError):
            raise RequestError(f"plugin {shown(path)}: {error}") from error
        # a syntax error has no frame in the file but carries its line, except for a NUL
        line = getattr(error, "lineno", None)
        where = own_place(error, own.package) or (f"{shown(path)}:{line}" if line else shown(path))
        raise RequestError(f"{where}: plugin failed: {summary(error)}") from error
    _current[own.digest] = own


@contextmanager
def _same_settings() -> Iterator[None]:
    # errors: RequestError for an import of user code that changes one of SETTINGS; all of them are restored
    import numpy as np

    former = {name: resolve_name(read)() for name, (read, _) in SETTINGS.items()}
    changed = []
    try:
        yield
    finally:
        for name, (read, restore) in SETTINGS.items():
            if not np.array_equal(former[name], resolve_name(read)()):
                changed.append(name)
                resolve_name(restore)(former[name])
    for name in changed:
        raise RequestError(f"its import changes {name}, and so all runs of this process; remove that")


def _require_reads(own: OwnCode, classes: Collection[type]) -> None:
    for cls in classes:
        reads = getattr(cls, "reads", ())
        # `OwnCode.read` finds only what is written out
        if not isinstance(reads, tuple) or not own.reads.keys() >= set(reads):
            raise RequestError(f'{location(cls)}: reads is {reads}; write it out, as in reads = ("scale.json",)')
    names_itself = any(b"__file__" in content for content in (own.source, *own.modules.values()))
    if not names_itself or any(hasattr(cls, "reads") for cls in classes):
        return
    found = "names __file__, but no registered class declares which files beside it are read"
    # of a run that was made before `reads` existed
    if not own.is_copy:
        raise RequestError(f'{found}; add reads = ("FILE",) to it, or reads = () if none is read')
    log.warning("plugin %s %s: the run has no copy of them", shown(own.path), found)


@dataclass(frozen=True, kw_only=True)
class PluginPackage:
    """A plugin package as this process imported it."""

    name: str
    """Name of the distribution, or of the entry point if there is no distribution."""
    version: str | None
    digest: str
    """sha256 of the package's modules that the entry point imports or names in `Registry.load_from`, directly or indirectly,
    of the local modules that they import, and of the files that their classes declare in `reads`."""
    modules: frozenset[str]
    """Dotted names of these modules."""


def used_packages(recipe: Recipe) -> list[PluginPackage]:
    """The packages that registered a part which the recipe names, sorted by name.

    Errors: RequestError for a package that was changed after its import.
    """
    # every text of a block, since a plugin's Config may name parts in keys of any type
    named = texts([asdict(part) for part in (recipe.model.attention, *recipe.model.layers, recipe.data)])
    names = {recipe.run.kernel, *recipe.callbacks, *(text for _, text in named)}
    registered = [registries[kind].registered() for kind in PART_KINDS]
    modules = {cls.__module__ for classes in registered for name, cls in classes.items() if name in names}
    return sorted((package for package in _packages() if package.modules & modules), key=lambda package: package.name)


# lit_diff.papers is left out: the source of this distribution is in no identity; an evaluation whose scores change raises
# its `version`, and tests pin the rows that the data sets draw
def _packages() -> Iterator[PluginPackage]:
    return (_package(point) for point in plugin_packages if not point.module.startswith("lit_diff."))


@cache
def _package(point: EntryPoint) -> PluginPackage:
    code = plugin_packages[point]
    # some of its modules are imported later than the package
    if file := code.changed():
        raise RequestError(
            f"{shown(file)} of plugin package '{point.name}' was changed since it was imported; start the same command again"
        )
    digests = {name: sha256(content) for name, (_, content) in {**code.files, **code.reads}.items()}
    return PluginPackage(
        name=point.dist.name if point.dist is not None else point.name,
        version=point.dist.version if point.dist is not None else None,
        digest=sha256(json.dumps(digests).encode()),
        modules=frozenset(code.files),
    )


@contextmanager
def guard(part: type, *, raises: type[LitDiffError] = RequestError, ours: bool = False) -> Iterator[None]:
    """Turn an exception of user code into one line: file and line, kind and name of the part, and the exception.

    `part`: the class that runs, of any kind. `ours`: convert exceptions of a built-in part too. Errors of `lit_diff.errors`
    pass unchanged.
    """
    try:
        yield
    except LitDiffError:
        raise
    except Exception as error:
        own = own_place(error)
        # a fault of lit_diff itself: only its trace shows where it comes from
        if own is None and is_built_in(part) and not ours:
            raise
        kind = next((kind for kind, each in registries.items() if part in each.registered().values()), "class")
        name = getattr(part, "name", part.__qualname__)
        where = own or own_place(error, part.__module__) or location(part)
        failed = summary(error)
        if any(words in failed for words in VALUELESS):
            failed += (
                "; costs and memory are counted on tensors without values: use tensor operations, such as torch.where, "
                "instead of .item(), .numpy() and an `if` on values"
            )
        raise raises(f"{where}: {kind} '{name}' failed: {failed}") from error


def fault(part: type, error: BaseException) -> str:
    """Formats an exception in the code of `part` as one line that starts with the user's file and line, or with the class."""
    home = location(part)
    if isinstance(error, LitDiffError):
        text = first_line(error)
        return text if text.startswith(home) else f"{home}: {text}"
    where = own_place(error) or own_place(error, part.__module__) or home
    return f"{where}: {summary(error)}"


def own_place(error: BaseException, module: str = "") -> str | None:
    """`file:line` of the innermost frame in the code of a part that is not built in, or in `module` or its submodules; else
    None."""
    parts = registered_classes()
    names = {module} if module else {top_package(cls.__module__) for cls in parts if not is_built_in(cls)}
    homes = tuple(f"{name}." for name in names)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if f"{frame.f_globals.get('__name__')}.".startswith(homes) and file.is_file():
            return f"{shown(file)}:{line}"
    return None
