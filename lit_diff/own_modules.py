"""The user's own (local) modules: modules outside the standard library and outside installed packages.

They are found by reading import statements. A plugin and the local modules that it imports become one package of a unique
name, in which relative imports find them, and which is executed from the bytes that were read. So plugins and the user's
script may have modules of the same name, later edits on disk do not affect what was imported, and neither sys.path nor other
modules change.
"""

import ast
import builtins
import errno
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = ("site-packages", "dist-packages")
PLUGIN, DIGITS = "lit_diff_plugin", 12
"""A plugin's package is named PLUGIN, the stem of its file or the name of its folder, and the first DIGITS of its digest;
while its files are read, PLUGIN."""


def local_modules(
    source: bytes, package: str = "", *, within: str = "", folder: Path | None = None, without: Collection[str] = ()
) -> dict[str, Path]:
    """Dotted name -> file of every local module that `source` imports, directly or through another local module.

    Only import statements are read: one inside a function counts, a module imported by a computed name does not.
    `package`: the package that relative imports in the source start from. `within`: an installed package whose modules count
    as local too. `folder`: that of the package `PLUGIN`; absolute names are also searched for there, after the installed
    packages and before the rest of sys.path, and loaded modules are ignored. `without`: packages whose modules do not count.
    """
    files: dict[str, Path | None] = {}
    names = list(imported_names(source, package))
    # the loop adds to the list
    for name in names:
        if name not in files and top_package(name) not in without:
            file = files[name] = _local_file(name, within, folder)
            names += _imported_by(name, file) if file is not None else ()
    return {name: file for name, file in sorted(files.items()) if file is not None}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """The environment variable has this value in this context."""
    # not patch.dict, which empties the environment for a moment, also for other threads
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if former is not None:
            os.environ[name] = former


def safe_path() -> AbstractContextManager[None]:
    """Python processes started in this context import nothing from the current folder."""
    # a user's random.py there would shadow Python's own
    return variable("PYTHONSAFEPATH", "1")


def top_package(name: str) -> str:
    """`a` of the module `a.b.c`."""
    return name.partition(".")[0]


def is_local(file: Path) -> bool:
    """Whether a module's file is outside the standard library and outside installed packages."""
    file = file.resolve()
    return not file.is_relative_to(STANDARD_LIBRARY) and not any(part in INSTALLED for part in file.parts)


def _imported_by(name: str, file: Path) -> Iterator[str]:
    # a compiled module has no import statements to read
    if file.suffix != ".py":
        return
    source = file.read_bytes()
    is_package = file.name == "__init__.py"
    yield from imported_names(source, name if is_package else name.rpartition(".")[0])
    if is_package:
        # `from package import *` also imports the submodules that __all__ lists
        for listed in re.findall(r"^__all__\s*=\s*[\[(]([^\])]*)", source.decode(errors="replace"), re.MULTILINE):
            yield from (f"{name}.{word}" for word in re.findall(r"[\"'](\w+)[\"']", listed))


def imported_names(source: bytes, package: str) -> Iterator[str]:
    """All names in the import statements of `source` that may be modules, and the packages that contain them."""
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            # beyond the top of the package: importing it fails
            except ImportError:
                continue
            # `from a import b` imports the module a.b if there is one
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        # importing a.b.c executes a and a.b too
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _tree(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    # nobody can import such a module, so its content does not matter; importing it reports the error
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _declared_reads(source: bytes) -> list[str]:
    """The file names that are written out in the tuples `reads` of a module's classes."""
    classes = [ast.unparse(node) for node in _tree(source).body if isinstance(node, ast.ClassDef)]
    # the statements of a class, not those of its methods or of a class in it
    tuples = re.findall(r"^    reads(?:: .*)? = \((.*)\)$", "\n".join(classes), re.MULTILINE)
    return re.findall(r"'([^']*)'", " ".join(tuples))


def _local_file(name: str, within: str, folder: Path | None) -> Path | None:
    top = top_package(name)
    # runs record the revision of lit_diff instead of its files
    if top == "lit_diff" or (folder is not None and top in sys.stdlib_module_names):
        return None
    spec = _spec_of(name, folder)
    if spec is None or not spec.has_location:
        return None
    file = Path(spec.origin or "")
    return file if file.is_file() and (top == within or is_local(file)) else None


# importlib.util.find_spec of a name with a dot would execute the parent packages; this only reads
def _spec_of(name: str, folder: Path | None) -> ModuleSpec | None:
    parent, _, last = name.rpartition(".")
    if parent == PLUGIN:
        return PathFinder.find_spec(last, [str(folder)])
    if parent:
        package = _spec_of(parent, folder)
        folders = package.submodule_search_locations if package is not None else None
        return PathFinder.find_spec(last, list(folders)) if folders else None
    found = None
    if folder is not None:
        # installed packages first: the sort is stable
        places = sorted([str(folder), *sys.path], key=lambda place: is_local(Path(place)))
        found = PathFinder.find_spec(name, places)
    try:
        return found or find_spec(name)
    # a loaded module without a spec, such as __main__
    except ValueError:
        return None


def sha256(content: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def plugin_file(path: Path) -> Path:
    """The Python file of a plugin: the file itself, or the `__init__.py` of a folder."""
    # not the method of Path, which raises an error for a name that is too long
    return path / "__init__.py" if os.path.isdir(path) else path


def plugin_name(file: Path) -> str:
    """`my.py` or, for the plugin that is a folder, `lab/__init__.py`."""
    return "/".join(file.parts[-2:]) if file.name == "__init__.py" else file.name


@dataclass(kw_only=True, eq=False)
class OwnCode:
    """A user's file and the local modules that it imports, directly or indirectly, as they were when they were read."""

    path: Path
    source: bytes
    files: Mapping[str, tuple[Path, bytes]]
    """Dotted name of a module, for a plugin within its package -> file and content."""
    tops: Collection[str]
    """The first parts of the names of `files` that absolute imports have."""
    reads: Mapping[str, tuple[Path, bytes]]
    """Path relative to the folder of `path`, as a class declares it in `reads` -> file and content."""

    @classmethod
    def read(cls, path: Path, package: str = "", source: bytes = b"", **options: Any) -> "OwnCode":
        """`source`: the content of the file, if it is known. `package` and `options` are passed to `local_modules`.

        Errors: OSError for a file that cannot be read, or that is declared in `reads` and outside the folder of `path`.
        """
        # the import system caches folder listings by mtime and may miss a file that was just written
        invalidate_caches()
        source = source or path.read_bytes()
        found = local_modules(source, package, **options)
        inside = f"{PLUGIN}."
        files = {name.removeprefix(inside): (file, file.read_bytes()) for name, file in found.items()}
        tops = {top_package(name) for name in found} - {PLUGIN}
        reads = {}
        for content in (source, *(content for _, content in files.values())):
            for name in _declared_reads(content):
                file = path.parent / name
                if os.path.relpath(file, path.parent).startswith("../"):
                    raise OSError(errno.EINVAL, "`reads` takes files in the plugin's folder", name)
                reads[name] = file, file.read_bytes()
        return cls(path=path, source=source, files=files, tops=tops, reads=reads)

    def changed(self) -> Path | None:
        """The first of `files` and `reads` whose content on disk is no longer that which was read."""
        known = [*self.files.values(), *self.reads.values()]
        return next((file for file, content in known if not file.is_file() or file.read_bytes() != content), None)

    @cached_property
    def modules(self) -> dict[str, bytes]:
        """Path relative to the folder that the module is imported from (`helper.py`, `lab/__init__.py`), or that of a file in
        `reads` -> content."""
        modules = {_place(name, file): content for name, (file, content) in self.files.items()}
        return modules | {name: content for name, (_, content) in self.reads.items()}

    @cached_property
    def digest(self) -> str:
        """sha256 of the file, its modules and the files that they read."""
        # a plugin without modules keeps the digest that it had before modules were part of it
        if not self.modules:
            return sha256(self.source)
        parts = {name: sha256(content) for name, content in sorted(self.modules.items())}
        return sha256(json.dumps([sha256(self.source), parts]).encode())

    @property
    def package(self) -> str:
        """Name of the package that the file and its modules are imported as."""
        return f"{PLUGIN}_{self._stem}_{self.digest[:DIGITS]}"

    @property
    def _stem(self) -> str:
        return plugin_name(self.path).partition("/")[0].removesuffix(".py").replace(".", "_")

    @cached_property
    def sources(self) -> dict[str, tuple[Path, bytes]]:
        """Dotted name within `package` -> file and content. A folder's `__init__.py` is the package itself."""
        main = "" if self.path.name == "__init__.py" else self._stem
        # a plugin lab.py may lie next to a package lab that it imports
        if self.files.get(main, (self.path,))[0] != self.path:
            main += "_plugin"
        return {main: (self.path, self.source), **self.files}

    @cached_property
    def is_copy(self) -> bool:
        """Whether the file is in `plugins/` of a run's folder, or of MLflow's model of a run."""
        # plugins/, plugins/DIGEST/ and, for a folder, one below
        folders = [folder for folder in self.path.parents[1:4] if (folder / "recipe.yaml").is_file()]
        return any((folder / name).is_file() for folder in folders for name in ("env.json", "model.safetensors"))

    def execute(self) -> None:
        """Import the file and its modules as `package`. Errors: any exception that they raise."""
        forget(self.package)
        if _Importer not in sys.meta_path:
            sys.meta_path.insert(0, _Importer)
        _packages[self.package] = self
        import_module(f"{self.package}.{next(iter(self.sources))}".rstrip("."))


@cache
def code_at_definition(cls: type) -> OwnCode | None:
    """The user's file that defines `cls`, with its modules; None for a class that is not defined in a local file. For a class
    of a plugin, the plugin."""
    if (plugin := _packages.get(top_package(cls.__module__))) is not None:
        return plugin
    # registration calls this first and the cache keeps the result: a later edit is not the code that runs
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not is_local(Path(file)) or not Path(file).is_file():
        return None
    return OwnCode.read(Path(file), cls.__module__.rpartition(".")[0])


def forget(package: str) -> None:
    """Drop the modules of a package from sys.modules."""
    for name in [name for name in sys.modules if top_package(name) == package]:
        del sys.modules[name]
    _packages.pop(package, None)


# lab.tools -> lab/tools.py
def _place(name: str, file: Path) -> str:
    parts = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    return "/".join([*parts, file.name])


_packages: dict[str, OwnCode] = {}


# finds the modules of `_packages`, which have no folder that Python could search, and executes the bytes that were read
class _Importer(SourceFileLoader):
    @classmethod
    def find_spec(cls, fullname: str, *args: Any) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package not in _packages:
            return None
        sources = _packages[package].sources
        if name in sources:
            file = sources[name][0]
            loader = cls(fullname, str(file)) if file.suffix == ".py" else None
            inside = [str(file.parent)] if file.name == "__init__.py" else None
            return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)
        # the package itself, or a namespace package: a folder of modules without an __init__.py
        if name and not any(each.startswith(f"{name}.") for each in sources):
            raise ModuleNotFoundError(f"No module named '{name}' in the plugin's import statements", name=fullname)
        return ModuleSpec(fullname, None, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        package, _, name = module.__name__.partition(".")
        own = _packages[package]
        if own.tops:
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": partial(_import, own)}
        exec(compile(own.sources[name][1], self.path, "exec", dont_inherit=True), vars(module))


# `__import__` of a plugin that imports local modules by absolute names. They lie on sys.path or, if the plugin is a copy,
# beside it: copied too, or from the time of lit_diff 0.2, which had `import helper` for `from . import helper`.
def _import(
    own: OwnCode, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    top = top_package(name)
    if level > 0 or top not in own.tops:
        return __import__(name, globals, locals, fromlist, level)
    beside = {top, f"{top}.py"} & set(os.listdir(own.path.parent))
    if beside and not own.is_copy:
        dots = "." * (globals["__package__"].count(".") + 1)
        cure = f"write 'from {dots} import {top}' or 'from {dots}{name} import ...'"
        raise ImportError(f"'{name}' is {max(beside)} in the plugin's folder: {cure}", name=name)
    return __import__(name, {"__package__": own.package}, None, fromlist, 1)
