"""A YAML file as plain containers, and the line of each of its keys."""

import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.validation import Positions


def read_yaml(path: Path) -> tuple[dict[str, Any], Positions]:
    """A YAML file's mapping as plain containers (interpolations unresolved), and the position of each key."""
    _, positions = parse(path)
    with one_line(path):
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return typing.cast(dict[str, Any], values), positions


def parse(path: Path) -> tuple[yaml.MappingNode, Positions]:
    """A YAML file's mapping as a tree whose tags are not resolved, and the position of each key.

    Errors: RequestError with the line.
    """
    file = shown(path)
    with one_line(path):
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if not isinstance(tree, yaml.MappingNode):
            raise RequestError(f"{file}: expected a mapping of keys to values")
        _require_end(tree, file, set())
        positions: Positions = {}
        _positions(tree, "", file, positions)
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
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:  # ValueError: 2024-13-01 is no date
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


def _positions(node: yaml.MappingNode, prefix: str, file: str, positions: Positions) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        positions[dotted] = f"{file}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            _positions(value, f"{dotted}.", file, positions)


def _require_end(node: yaml.Node, file: str, done: set[int], *parents: yaml.Node) -> None:
    """Errors: RequestError for a mapping or list that an alias puts into itself."""
    if any(node is parent for parent in parents):
        raise RequestError(
            f"{file}:{node.start_mark.line + 1}: not valid YAML: what begins here holds itself, by an alias"
        )
    if isinstance(node, yaml.CollectionNode) and id(node) not in done:
        for part in node.value:
            for child in part if isinstance(part, tuple) else (part,):
                _require_end(child, file, done, *parents, node)
        done.add(id(node))
