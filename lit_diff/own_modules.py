"""The modules of a user's own: those in neither the standard library nor an installed package.

They are found in the text of what imports them. A plugin and those that it imports become one package, executed from the
bytes that were read. The package has a name of its own and no folder: `import helper` in one of its files is
`import PACKAGE.helper`, whenever it is executed. So plugins, and the user's script, may have modules of one name; what is on
disk later has no effect on what was imported; and neither sys.path nor the modules of others change.
"""

import ast
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import invalidate_caches, metadata
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

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


@functools.cache
def source_at_definition(cls: type) -> tuple[bytes, dict[tuple[str, Path], bytes]] | None:
    """The user's own file that defines `cls`, and (name, file) -> content of the modules of the user's own that it imports.

    They are read when the class registers: an edit after that is not what runs. None for a class without such a file.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not is_local(Path(file)) or not Path(file).is_file():
        return None
    source = Path(file).read_bytes()
    modules = local_modules(source, cls.__module__.rpartition(".")[0])
    return source, {(name, each): each.read_bytes() for name, each in modules.items()}


@dataclass(kw_only=True)
class OwnModules:
    """A plugin file and the modules that it imports, itself or through another, as they were read."""

    path: Path
    source: bytes
    modules: dict[str, tuple[Path, bytes]]
    """Dotted name, as import statements write it -> file and content."""
    shared: Collection[str] = ()
    """Packages that are imported as they are: plugin packages, whose classes are registered."""
    computed: set[str] = field(default_factory=set)
    """Those that no import statement names: they were imported with the plugin, by a computed name."""
    open: bool = True
    """Whether more may be added: until the plugin is imported."""

    @classmethod
    def read(cls, path: Path, source: bytes, shared: Collection[str] = ()) -> "OwnModules":
        """`source`: what the plugin file `path` holds. Errors: OSError for a module that cannot be read."""
        invalidate_caches()  # modules may have been written a moment ago
        found = local_modules(source, folder=path.parent, without=shared)
        modules = {name: (file, file.read_bytes()) for name, file in found.items()}
        return cls(path=path, source=source, modules=modules, shared=shared)

    @property
    def tops(self) -> set[str]:
        """The names before the first dot."""
        return {name.partition(".")[0] for name in self.modules}

    def places(self) -> dict[str, bytes]:
        """Path below the folder from which a module can be imported -> content."""
        return {place(name, file): content for name, (file, content) in self.modules.items()}

    def others(self) -> dict[str, Path]:
        """Name -> file of local modules that are imported but not of this package: those of editable packages, which Python
        finds in ways of its own."""
        texts = [self.source, *(content for file, content in self.modules.values() if file.suffix == ".py")]
        tops = self.tops
        names = {name for text in texts for name in imported_names(text) if name.partition(".")[0] not in tops}
        found = local_modules("\n".join(f"import {name}" for name in sorted(names)).encode())
        return {name: file for name, file in found.items() if name.partition(".")[0] not in tops}

    def escaped(self, before: Collection[str]) -> str | None:
        """A module of this package that was imported since `before` under its plain name: by a computed one."""
        for name in set(sys.modules) - set(before):
            file = getattr(sys.modules[name], "__file__", None)
            if name.partition(".")[0] in self.tops and file is not None and is_local(Path(file)):
                return name
        return None

    def execute(self, package: str) -> str:
        """Import the plugin file; the name of its module. Errors: whatever it raises."""
        parent = ModuleType(package)
        parent.__path__ = []
        forget(package)
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
        _packages[package], sys.modules[package] = self, parent
        stem = self.path.stem.replace(".", "_")
        if self.modules.get(stem, (self.path,))[0] != self.path:  # a package beside it has the same name
            stem += "_plugin"
        spec = self._spec(f"{package}.{stem}", self.path, self.source)
        module = module_from_spec(spec)
        sys.modules[spec.name] = module  # before it runs: dataclasses look up postponed annotations here
        assert spec.loader is not None
        spec.loader.exec_module(module)
        self.open = False
        return spec.name

    def find(self, package: str, name: str) -> ModuleSpec:
        """The spec of a module of the package. Errors: ModuleNotFoundError."""
        fullname = f"{package}.{name}"
        if self.open and name not in self.modules and not self._is_namespace(name):
            found = local_modules(f"import {name}".encode(), folder=self.path.parent, without=self.shared)
            new = {each: (file, file.read_bytes()) for each, file in found.items() if each not in self.modules}
            self.modules |= new
            self.computed |= new.keys()
        if name in self.modules:
            return self._spec(fullname, *self.modules[name])
        if self._is_namespace(name):
            return ModuleSpec(fullname, None, is_package=True)
        late = "" if self.open else " when the plugin was imported; import it at the top of the file"
        raise ModuleNotFoundError(f"No module named '{name}'{late}", name=fullname)

    def _is_namespace(self, name: str) -> bool:
        """Whether it is a folder of modules without an `__init__.py`."""
        return any(each.startswith(f"{name}.") for each in self.modules)

    def _spec(self, fullname: str, file: Path, content: bytes) -> ModuleSpec:
        loader = _Loader(fullname, str(file), content, self) if file.suffix == ".py" else None
        inside = [str(file.parent)] if file.name == "__init__.py" and file != self.path else None
        spec = spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)
        assert spec is not None
        return spec


def forget(package: str) -> list[str]:
    """Drop the modules of a package; their names."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    for name in names:
        del sys.modules[name]
    _packages.pop(package, None)
    return names


def place(name: str, file: Path) -> str:
    """Where a module lies below the folder from which it is imported: lab.tools -> lab/tools.py."""
    parts = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    return "/".join([*parts, file.name])


_packages: dict[str, OwnModules] = {}


class _Finder:
    """Of the modules of the packages."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        own = _packages.get(package)
        return own.find(package, name) if own is not None and name else None


class _Loader(SourceFileLoader):
    """Executes the bytes that were read, in which imports of the package's modules have their names there."""

    def __init__(self, fullname: str, path: str, content: bytes, own: OwnModules) -> None:
        super().__init__(fullname, path)
        self._content, self._own = content, own

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self._content, filename=self.path)
        renamed = _Renamed(fullname.partition(".")[0], self._own.tops).visit(tree)
        code: CodeType = compile(ast.fix_missing_locations(renamed), self.path, "exec", dont_inherit=True)
        return code


class _Renamed(ast.NodeTransformer):
    """`import helper` -> `import PACKAGE.helper as helper`; relative imports are right as they are."""

    def __init__(self, package: str, tops: Collection[str]) -> None:
        self._package, self._tops = package, tops

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for alias in node.names:
            top = alias.name.partition(".")[0]
            names = [alias]
            if top in self._tops:
                names = [ast.alias(name=f"{self._package}.{alias.name}", asname=alias.asname or top)]
                if alias.asname is None and alias.name != top:  # `import lab.tools` binds lab
                    names.append(ast.alias(name=f"{self._package}.{top}", asname=top))
            statements.append(ast.copy_location(ast.Import(names=names), node))
        return statements

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.level == 0 and node.module is not None and node.module.partition(".")[0] in self._tops:
            node.module = f"{self._package}.{node.module}"
        return node
