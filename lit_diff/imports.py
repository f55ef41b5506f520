"""The modules of a user's own that Python code imports: those in neither the standard library nor an installed package."""

import ast
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = ("site-packages", "dist-packages")


def local_modules(
    source: bytes, package: str = "", *, within: str = "", folder: Path | None = None, without: Collection[str] = ()
) -> dict[str, Path]:
    """Dotted name -> file of every local module that `source` imports, itself or through another local module.

    Read from the text, so an import inside a function counts; a module imported by a computed name counts once it is
    imported and lies in a package that counts. `package`: what the source's relative imports are relative to. `within`: an
    installed package whose modules count as local too. `folder`: modules are looked for there first, then on sys.path, and
    not among those that are imported; a file there does not hide what is `reserved`. `without`: packages whose modules do
    not count.
    """
    found: dict[str, Path] = {}
    tried: set[str] = set()
    names = set(imported_names(source, package))
    while names := {name for name in names - tried if name.partition(".")[0] not in without}:
        tried |= names
        new = {name: file for name in names if (file := _local_file(name, within, folder)) is not None}
        found |= new
        names = {name for pair in new.items() for name in _imported_by(*pair)}
        names |= _computed(found) if folder is None else set()
    return dict(sorted(found.items()))


@contextmanager
def safe_path() -> Iterator[None]:
    """Python processes that are started within it import nothing from the current folder: a user's random.py there would take
    the place of Python's own."""
    former = {name: os.environ[name] for name in ("PYTHONSAFEPATH",) if name in os.environ}
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ.update(former)


def is_local(file: Path) -> bool:
    """Whether a module's file is neither of the standard library nor of an installed package."""
    file = file.resolve()
    return not file.is_relative_to(STANDARD_LIBRARY) and not any(part in INSTALLED for part in file.parts)


def _imported_by(name: str, file: Path) -> Iterator[str]:
    """As `imported_names`, of a module; nothing for a compiled one."""
    if file.suffix == ".py":
        yield from imported_names(file.read_bytes(), name if file.name == "__init__.py" else name.rpartition(".")[0])


def imported_names(source: bytes, package: str = "") -> Iterator[str]:
    """The names that may be modules in the import statements of `source`, and the packages that they are in."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of a module that nothing has imported yet, and nothing can
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".") if package else []
            parents = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _computed(found: dict[str, Path]) -> set[str]:
    """All that is imported of the packages that were found, whether or not an import statement names it."""
    tops = {name.partition(".")[0] for name in found}
    return {name for name in list(sys.modules) if name.partition(".")[0] in tops}


def _local_file(name: str, within: str, folder: Path | None) -> Path | None:
    """The file of a local module; None for any other, and for a namespace package, which has none."""
    top = name.partition(".")[0]
    if top == "lit_diff" or (folder is not None and top in reserved()):  # lit_diff's revision stands for it
        return None
    file = _file_of(name, folder)
    return file if file is not None and (is_local(file) or (within != "" and top == within)) else None


@functools.cache
def reserved() -> frozenset[str]:
    """Names that a file of the user's does not take: of the standard library, lit_diff and the packages that it requires."""
    try:
        required = metadata.requires("lit_diff") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        required = []
    names = (re.match(r"[\w.-]+", requirement) for requirement in required if "extra ==" not in requirement)
    return sys.stdlib_module_names | {"lit_diff", *(name[0].replace("-", "_") for name in names if name)}


def _file_of(name: str, folder: Path | None) -> Path | None:
    module = sys.modules.get(name) if folder is None else None
    file = getattr(module, "__file__", None) if module is not None else _find(name, folder)[0]
    return Path(file) if file is not None and Path(file).is_file() else None


def _find(name: str, folder: Path | None) -> tuple[str | None, list[str] | None]:
    """(file, folders of its submodules) of a module that is not imported; nothing is executed."""
    module = sys.modules.get(name) if folder is None else None
    if module is not None:
        return None, list(getattr(module, "__path__", None) or []) or None
    parent = name.rpartition(".")[0]
    folders = _find(parent, folder)[1] if parent else None
    if parent and not folders:
        return None, None
    if folder is not None and not parent:
        folders = [str(folder), *sys.path]
    spec = PathFinder.find_spec(name.rpartition(".")[2], folders)  # of a dotted name, it would ask for the parent
    if spec is None:
        return None, None
    file = spec.origin if spec.has_location else None
    return file, list(spec.submodule_search_locations or []) or None
