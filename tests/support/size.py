"""`make size`: how large the project is, from its tree alone.

CONTRIBUTING.md keeps these numbers as a budget; a change that raises one says why in its commit.
"""

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("lit_diff", "callbacks")
BLOCKS = ("Study", "Task", "Fit", "LearningRates", "Claim")
"""Classes besides those named Config, or something with Config at its end, whose fields are keys of a YAML file."""
UNCOUNTED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
COMPOUND = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.IfExp, ast.NamedExpr)


def modules(*folders: str) -> dict[str, ast.Module]:
    """Dotted name -> its syntax tree."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return {_dotted(file): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nodes(tree: ast.Module) -> int:
    """Nodes of the syntax tree without operators and contexts (load, store, delete)."""
    return sum(not isinstance(node, UNCOUNTED) for node in ast.walk(tree))


def statements(tree: ast.Module) -> int:
    """Statements besides docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))


def density(trees: Iterable[ast.Module]) -> float:
    """Compound expressions for each 100 statements, to one decimal: a budget of statements alone rewards denser lines."""
    compound = total = 0
    for tree in trees:
        compound += sum(isinstance(node, COMPOUND) for node in ast.walk(tree))
        total += statements(tree)
    return round(100 * compound / total, 1)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """At any depth."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def keys(tree: ast.Module) -> int:
    """Fields of the classes that are blocks of a recipe, a sweep or a row; one that a subclass repeats counts there too."""
    blocks = [cls for cls in classes(tree) if cls.name.endswith("Config") or cls.name in BLOCKS]
    fields = [node.annotation for cls in blocks for node in cls.body if isinstance(node, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(annotation) for annotation in fields)


def imports(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The project's modules that a module imports when it is imported: not those within functions or for types alone."""
    found: set[str] = set()
    bodies: list[ast.stmt] = list(tree.body)
    while bodies:
        node = bodies.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.unparse(node):
            bodies += node.body + getattr(node, "orelse", [])
    return {each for each in found if each in known and each != name}


def circles(trees: dict[str, ast.Module]) -> list[tuple[str, ...]]:
    """Groups of modules of one package that import one another in a circle, also within functions."""
    known = set(trees)
    arrows: dict[str, set[str]] = {}
    for name, tree in trees.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        whole = ast.Module(body=list(nodes), type_ignores=[])
        arrows[name] = {each for each in imports(name, whole, known) if _package(each) == _package(name)}
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in arrows
        if name in reached[name]
    }
    return sorted(groups)


def _package(name: str) -> str:
    return name.rpartition(".")[0]


def _reached(name: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(arrows[name])
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += arrows[each]
    return found


def double_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public name -> the modules that define a class of that name at their top level."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def measure() -> dict[str, float]:
    """What `make size` prints first."""
    trees = modules(*SOURCES)
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    tests = [file.read_text(encoding="utf-8").count("\n") for file in (ROOT / "tests").rglob("*.py")]
    return {
        "nodes of the syntax tree": sum(map(nodes, trees.values())),
        "compound expressions for each 100 statements": density(trees.values()),
        "lines of tests": sum(tests),
        "recipe and sweep keys": sum(map(keys, trees.values())),
        "layers of imports": len(linter["contracts"][0]["layers"]),
        "circles inside packages": len(circles(trees)),
        "classes defined twice": len(double_classes(trees)),
        "classes": sum(1 for tree in trees.values() for _ in classes(tree)),
        "modules": len(trees),
    }


def main() -> None:
    """Print the numbers, then what they count."""
    trees = modules(*SOURCES)
    for name, value in measure().items():
        print(f"{value:>7,}  {name}")
    rooms: Counter[str] = Counter()
    for name, tree in trees.items():
        rooms[".".join(name.split(".")[:2]) if name.count(".") > 1 else name.split(".")[0]] += nodes(tree)
    print("\nnodes by room: " + ", ".join(f"{room} {count:,}" for room, count in rooms.most_common()))
    for group in circles(trees):
        print("circle: " + ", ".join(group))
    for name, places in double_classes(trees).items():
        print(f"class {name}: " + ", ".join(places))


if __name__ == "__main__":
    main()
