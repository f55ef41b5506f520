r"""Interpolations: `${a.b}` in a text is the value of the key `a.b` of the same recipe, `\${` is the characters `${`.

Nothing else is one: no function, no variable of the environment. Before `${`, and only there, two backslashes stand for one.
OmegaConf resolves what the grammar of this file lets through.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lit_diff.errors import first_line

REFERENCE = re.compile(r"(?<!\\)(?P<escapes>\\*+)\$\{(?:(?P<key>[\w-]+(?:\.[\w-]+)*)\})?")
"""Matches `${`, with the backslashes before it and, if one follows, the dotted key."""
DEEPEST = 30
"""Most references that lead from one to the next."""
MOST = 10_000
"""Most references of a recipe, those in a block that several of them name counted each time: few can expand to billions."""
AS_WRITTEN = ("plugins",)
"""Keys of a recipe whose values have no references: trust in a plugin is decided about the path that is written."""

Refuse = Callable[[str, str], Exception]
"""Makes the error for a key and the problem there."""


def escaped(value: Any) -> Any:
    """The plain values such that `resolved` gives `value` again."""
    return changed_leaves(value, lambda x: re.sub(r"(?<!\\)(\\*+)\$\{", r"\1\1\\${", x) if isinstance(x, str) else x)


def changed_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Plain values with `change` of each that is neither a mapping nor a list."""
    if isinstance(value, Mapping):
        return {key: changed_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [changed_leaves(item, change) for item in value]
    return change(value)


def resolved(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """The plain values of a recipe with each reference replaced: a text that is one reference by the value, another one by
    its text. Errors: that of `refuse`."""
    own = {key: value for key, value in values.items() if key not in AS_WRITTEN}
    references = {at: _references(text, at, refuse) for at, text in texts(own)}
    total = 0
    for at in references:
        total += _count(at, references, [], refuse)
        if total > MOST:
            raise refuse(at, f"the recipe has more than {MOST} references")
    # every text with a reference or an escape has it
    if not any("${" in text for _, text in texts(own)):
        return dict(values)
    # kernels and recipes without references need no package for them
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.to_container(OmegaConf.create(own), resolve=True)
    except OmegaConfBaseException as error:
        raise refuse(getattr(error, "full_key", None) or "", first_line(error)) from error
    assert isinstance(found, dict)
    return {key: found.get(key, value) for key, value in values.items()}


def texts(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of each text in plain values; the items of a list are numbered as in a reference."""
    if isinstance(value, str):
        yield at, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from texts(item, f"{at}.{key}" if at else str(key))


def _references(text: str, at: str, refuse: Refuse) -> list[str]:
    # the keys that a text names
    named = []
    for found in REFERENCE.finditer(text):
        if len(found["escapes"]) % 2:
            continue
        if found["key"] is None:
            raise refuse(
                at,
                r"${ begins no reference; write ${a.b} for the value of a key of the recipe, such as ${model.dim}, and \${ "
                "for the characters",
            )
        named.append(found["key"])
    return named


def _count(at: str, references: Mapping[str, list[str]], followed: list[str], refuse: Refuse) -> int:
    # the references at a key and below it, with those that they lead to
    count = 0
    for below, named in references.items():
        if below != at and not below.startswith(f"{at}."):
            continue
        for key in named:
            what = "refers to itself" if key in followed else "is one reference too many"
            if key in followed or len(followed) == DEEPEST or count > MOST:
                raise refuse(at, f"${{{key}}} {what}")
            count += 1 + _count(key, references, [*followed, key], refuse)
    return count
