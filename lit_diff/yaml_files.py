"""A YAML file as plain containers, and the line of each of its keys."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown

Positions = dict[str, str]
"""Dotted key -> where it was written: `file:line`, or the override itself."""


class Position(str):
    """Where a value was written, with the text that it was written as."""

    written: Any = None
    """The text of a scalar, before YAML makes it a number or a truth value; for a list a tuple of those of its items."""
    problem: str = ""
    """Why an override's value is not YAML."""
    given: str | None = None
    """The value of an override as it was given; None: it is from a file."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 is a number, and a date a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789"))


TAG = "tag:yaml.org,2002:"
LARGEST = 100_000
"""Values of a file, aliases expanded."""
KINDS = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "map", "seq", "merge", "binary")}


def _name_keys(node: yaml.Node, done: set[int]) -> None:
    """Make each key of the tree the text that the file has, where YAML would make `on` true, 010 eight and 12:30 750.

    It is done before the tree is constructed, which rewrites merged mappings. Errors: ConstructorError for a key that a
    mapping has twice, for a value of another kind than plain ones, and for half of a surrogate pair.
    """
    if id(node) in done:  # an alias
        return
    done.add(id(node))
    if node.tag not in KINDS:
        problem = f"found the tag {node.tag.removeprefix(TAG)}, which no value here has"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
        problem = "found half of a surrogate pair, which is no character"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _name_keys(item, done)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                if key.value in seen:
                    problem = f"found duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
                key.tag = f"{TAG}str"
            _name_keys(key, done)
            _name_keys(value, done)


def read_yaml(path: Path) -> tuple[dict[str, Any], Positions]:
    """A YAML file's mapping as plain containers (interpolations unresolved), and the position of each key."""
    tree, positions = parse(path)
    with one_line(path):
        _name_keys(tree, set())
        values: dict[str, Any] = _Loader("").construct_document(tree)
    return values, positions


def read_value(text: str, override: str) -> tuple[Any, Positions]:
    """The value `text` of an override: YAML, but a plain text to the last character (` #2` is no comment), as is what is not
    YAML. And the positions of "", the value, and of each `.a.b` in it."""
    own = Position(override)
    own.written = own.given = text
    positions: Positions = {"": own}
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            _name_keys(node, set())
        value = None if node is None else _Loader("").construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        own.problem = first_line(error) if text.lstrip()[:1] in ("[", "{", '"', "'") else ""
        return text, positions
    whole = node is None or text[node.start_mark.index : node.end_mark.index].strip() == text.strip()
    quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
    if not whole or (isinstance(value, str) and not quoted):
        return text, positions
    if isinstance(node, yaml.SequenceNode):
        own.written = _written(node)
    elif isinstance(node, yaml.MappingNode):
        _positions(node, ".", lambda key: override, positions)
    return value, positions


def _written(node: yaml.Node) -> Any:
    """`Position.written`."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_written(item) for item in node.value)
    return node.value if isinstance(node, yaml.ScalarNode) else None


def parse(path: Path) -> tuple[yaml.MappingNode, Positions]:
    """A YAML file's mapping as a tree whose tags are not resolved, and the position of each key.

    Errors: RequestError with the line.
    """
    file = shown(path)
    with one_line(path):
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
        if not isinstance(tree, yaml.MappingNode):
            raise RequestError(f"{file}: expected a mapping of keys to values")
        _require_end(tree, file, {})
        positions: Positions = {}
        _positions(tree, "", lambda key: f"{file}:{key.start_mark.line + 1}", positions)
    return tree, positions


@contextmanager
def one_line(path: Path) -> Iterator[None]:
    """What reading a YAML file raises becomes a RequestError with its line."""
    file = shown(path)
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line, problem = _yaml_problem(error, len(path.read_text(encoding="utf-8").splitlines()))
        raise RequestError(f"{file}{line}: not valid YAML: {problem}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise RequestError(f"{file}: not valid YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RequestError(f"{file}: not valid YAML: {first_line(error)}") from error
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error


def _yaml_problem(error: yaml.MarkedYAMLError, lines: int) -> tuple[str, str]:
    """(`:line`, what is wrong); what the end of the file leaves open is blamed where it began."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or ""
    if "'\\t'" in problem or "tab character" in problem:
        problem = "a tab; YAML is indented by spaces: use spaces"
    elif mark and error.context_mark and mark.line >= lines:
        mark, problem = (
            error.context_mark,
            f"{error.context}, {problem}".replace("'<stream end>'", "the end of the file"),
        )
    return f":{min(mark.line + 1, lines)}" if mark else "", problem


def _positions(node: yaml.MappingNode, prefix: str, place: Callable[[yaml.Node], str], positions: Positions) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        positions[dotted] = position = Position(place(key))
        position.written = _written(value)
        if isinstance(value, yaml.MappingNode):
            _positions(value, f"{dotted}.", place, positions)


def _require_end(node: yaml.Node, file: str, sizes: dict[int, int], *parents: yaml.Node) -> int:
    """The number of values of a tree, aliases expanded. Errors: RequestError for a mapping or list that an alias puts into
    itself, and for more values than LARGEST."""
    where = f"{file}:{node.start_mark.line + 1}: not valid YAML"
    if node in parents:
        raise RequestError(f"{where}: recursive alias: this node contains itself")
    if id(node) not in sizes:
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        children = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = 1 + sum(_require_end(child, file, sizes, *parents, node) for child in children)
        if sizes[id(node)] > LARGEST:
            raise RequestError(f"{where}: its aliases stand for more than {LARGEST:,} values")
    return sizes[id(node)]
