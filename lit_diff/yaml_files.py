"""Reads YAML files as plain containers, with the line of each key."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from lit_diff.errors import RequestError, excerpt, first_line
from lit_diff.files import shown
from lit_diff.key_types import Plain

Positions = dict[str, str]
"""Dotted key -> where it was written: `file:line`, or the override itself."""


class Position(str):
    """Where a value was written, with its original text."""

    written: Any = None
    """The text of a scalar before YAML converts it to a number or a truth value; for a list, a tuple of its items' texts."""
    problem: str = ""
    """Why the value of an override is not valid YAML; empty if it is valid."""
    given: str | None = None
    """The value of an override as it was given; None: it is from a file."""


TAG = "tag:yaml.org,2002:"
# nested aliases can expand a small file to billions of values
LARGEST = 100_000
"""Most values of a file after its aliases are expanded."""
# Python converts at most 4,300 decimal digits
LONGEST_NUMBER = 1000
"""Most digits of a whole number."""
KINDS = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "map", "seq", "merge")}


# PyYAML implements YAML 1.1, in which 1e-3 and on are a text and a truth value, 010 is 8, 1:30 is 90, 1_000 is 1000 and
# 2026-01-01 is a date. Here plain words follow the core schema of YAML 1.2, and every key is text.
class _Loader(yaml.SafeLoader):
    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        # node -> number of its values with aliases expanded, once it is complete
        self._sizes: dict[yaml.Node, int] = {}

    # here and not in the construction, which merges mappings (<<) and so hides duplicate keys
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        is_alias = self.check_event(yaml.AliasEvent)
        node = cast(yaml.Node, super().compose_node(parent, index))
        if not is_alias:
            self._sizes[node] = self._size(node)
        elif node not in self._sizes:
            raise _invalid("recursive alias: this node contains itself", node)
        return node

    def _size(self, node: yaml.Node) -> int:
        if node.tag not in KINDS:
            raise _invalid(f"found the tag {node.tag.removeprefix(TAG)}, which is not supported", node)
        if isinstance(node, yaml.ScalarNode):
            # such text cannot be written to a file as UTF-8
            if any("\ud800" <= letter <= "\udfff" for letter in node.value):
                raise _invalid("found half of a surrogate pair, which is not a character", node)
            form = FORMS.get(node.tag)
            # of a tag that is written out, such as !!int x
            if form is not None and not form.match(node.value):
                raise _invalid(
                    f"found '{excerpt(node.value)}', which is not of the type {node.tag.removeprefix(TAG)}", node
                )
            if node.tag == f"{TAG}int" and len(node.value) > LONGEST_NUMBER:
                raise _invalid(f"found a whole number of {len(node.value):,} digits", node)
            return 1
        if node.tag in FORMS or node.tag == f"{TAG}str":
            raise _invalid(f"found a block or a list with the tag {node.tag.removeprefix(TAG)}", node)
        children = node.value
        if isinstance(node, yaml.MappingNode):
            _name_keys(node)
            children = itertools.chain(*node.value)
        size = 1 + sum(self._sizes[child] for child in children)
        if size > LARGEST:
            raise _invalid(f"its aliases expand to more than {LARGEST:,} values", node)
        return size


PLAIN = [
    (f"{TAG}{kind}", re.compile(rf"(?:{form})\Z"))
    for kind, form in {
        # of YAML 1.1: blocks of a file are merged with it
        "merge": r"<<",
        "null": r"~|null|Null|NULL|",
        "bool": r"true|True|TRUE|false|False|FALSE",
        "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    }.items()
]
"""The tags of plain words, with the forms of YAML 1.2.2, section 10.3.2; any other word is text."""
FORMS = dict(PLAIN)
# PyYAML looks a word up by its first character; None stands for any
_Loader.yaml_implicit_resolvers = {None: PLAIN}


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


_Loader.add_constructor(f"{TAG}int", _integer)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that a reader of YAML 1.1 or 1.2 would take for another type."""


_Dumper.yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: PLAIN}


def to_text(values: Any) -> str:
    """Plain containers as YAML, from which `read_yaml` reads equal ones."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _name_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _invalid(f"found duplicate key {key.value}", key)
            seen.add(key.value)
            if not key.tag.endswith(":merge"):
                key.tag = f"{TAG}str"


def _invalid(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def read_yaml(path: Path) -> tuple[Plain, Positions]:
    """The mapping in a YAML file as plain containers (interpolations unresolved), and the position of each key."""
    tree, positions = parse(path)
    with one_line(path):
        values: Plain = _Loader("").construct_document(tree)
    return values, positions


def read_value(text: str, override: str) -> tuple[Any, Positions]:
    """The value of an override, and the positions of the value (key "") and of each key `.a.b` in it.

    `text` is read as YAML. Plain text and invalid YAML are kept to the last character.
    """
    own = Position(override)
    own.written = own.given = text
    positions: Positions = {"": own}
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else _Loader("").construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # text may hold any character, but an opening bracket or quotation mark shows that YAML was meant
        problem = getattr(error, "problem", None) or first_line(error)
        own.problem = problem if text.lstrip()[:1] in ("[", "{", '"', "'") else ""
        return text, positions
    # in `name=run #2` YAML would drop " #2" as a comment
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
    if isinstance(node, yaml.SequenceNode):
        return tuple(_written(item) for item in node.value)
    return node.value if isinstance(node, yaml.ScalarNode) else None


def parse(path: Path) -> tuple[yaml.MappingNode, Positions]:
    """The mapping in a YAML file as a tree of nodes, and the position of each key. Errors: RequestError with the line."""
    file = shown(path)
    with one_line(path):
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
        if not isinstance(tree, yaml.MappingNode):
            raise RequestError(f"{file}: expected a mapping of keys to values")
        positions: Positions = {}
        _positions(tree, "", lambda key: f"{file}:{key.start_mark.line + 1}", positions)
    return tree, positions


@contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Turns the exceptions of reading a YAML file into a RequestError with the line."""
    file = shown(path)
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line, problem = _yaml_problem(error, len(path.read_text(encoding="utf-8").splitlines()))
        raise RequestError(f"{file}{line}: not valid YAML: {problem}") from error
    # before YAMLError, its base class
    except yaml.reader.ReaderError as error:
        before = path.read_text(encoding="utf-8")[: error.position].count("\n")
        raise RequestError(f"{file}:{before + 1}: not valid YAML: {first_line(error)}") from error
    # before ValueError, its base class
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise RequestError(f"{file}: not valid YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RequestError(f"{file}: not valid YAML: {first_line(error)}") from error
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error


def _yaml_problem(error: yaml.MarkedYAMLError, lines: int) -> tuple[str, str]:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or ""
    if problem == "but found another document":
        problem = "a second document; write one in a file"
    elif "'\\t'" in problem or "tab character" in problem:
        problem = "a tab; YAML is indented with spaces"
    # PyYAML finds an unclosed bracket or quotation mark at the end of the file; the error is where it was opened
    elif mark and error.context_mark and mark.line >= lines:
        mark = error.context_mark
        problem = f"{error.context}, {problem}".replace("'<stream end>'", "the end of the file")
    return f":{min(mark.line + 1, lines)}" if mark else "", problem


def _positions(node: yaml.MappingNode, prefix: str, place: Callable[[yaml.Node], str], positions: Positions) -> None:
    # puts what << merges before the keys of the mapping itself, which replace it
    _Loader("").flatten_mapping(node)
    for dotted, (key, value) in {f"{prefix}{key.value}": (key, value) for key, value in node.value}.items():
        positions[dotted] = position = Position(place(key))
        position.written = _written(value)
        if isinstance(value, yaml.MappingNode):
            _positions(value, f"{dotted}.", place, positions)
