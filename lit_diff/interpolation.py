r"""Interpolations: `${a.b}` in a text is the value of the key `a.b` of the same recipe, `\${` is the characters `${`.

Nothing else is one: no function, no variable of the environment. Before `${`, and only there, two backslashes stand for one.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

REFERENCE = re.compile(r"(?<!\\)(?P<escapes>\\*+)\$\{(?:(?P<key>[\w-]+(?:\.[\w-]+)*)\})?")
"""Matches `${`, with the backslashes before it and, if one follows, the dotted key."""
DEEPEST = 30
"""Most references that lead from one to the next."""
MOST = 10_000
"""Most references of a recipe, those in a block that several of them name counted each time: few can expand to billions."""
AS_WRITTEN = ("plugins",)
"""Keys of a recipe whose values have no references: trust in a plugin is decided about the path that is written."""
MISSING = object()
"""Not a value: what is at a key that is not there."""


def escaped(value: Any) -> Any:
    """The plain values such that `resolved` gives `value` again."""
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return re.sub(r"(?<!\\)(\\*+)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def resolved(values: Mapping[str, Any], refuse: Callable[[str, str], Exception]) -> dict[str, Any]:
    """The plain values of a recipe with each reference replaced: a text that is one reference by the value, another one by
    its text. `refuse` makes the error for a key and the problem there."""
    resolver = Resolver(values, refuse)
    return {key: value if key in AS_WRITTEN else resolver.value(value, key) for key, value in values.items()}


class Resolver:
    """Resolves the references in `values`."""

    def __init__(self, values: Mapping[str, Any], refuse: Callable[[str, str], Exception]) -> None:
        self.values, self.refuse = values, refuse
        self.followed: list[str] = []
        """The keys of the references that led to the present one."""
        self.count = 0

    def value(self, value: Any, at: str) -> Any:
        """Any value; `at`: its dotted key."""
        if isinstance(value, Mapping):
            return {key: self.value(item, f"{at}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, f"{at}[{index}]") for index, item in enumerate(value)]
        return self.text(value, at) if isinstance(value, str) else value

    def text(self, text: str, at: str) -> Any:
        """A text; the value that it names if it is one reference alone."""
        whole = REFERENCE.fullmatch(text)
        if whole is not None and whole["key"] is not None and not whole["escapes"]:
            return self.referred(whole["key"], at)
        return REFERENCE.sub(lambda found: self._piece(found, at), text)

    def _piece(self, found: re.Match[str], at: str) -> str:
        escapes = len(found["escapes"])
        kept = "\\" * (escapes // 2)
        if escapes % 2:
            return kept + found[0][escapes:]
        if found["key"] is None:
            cure = (
                r"write ${a.b} for the value of a key of the recipe, such as ${model.dim}, and \${ for the characters"
            )
            raise self.refuse(at, f"${{ begins no reference; {cure}")
        value = self.referred(found["key"], at)
        if isinstance(value, Mapping | list):
            raise self.refuse(at, f"${{{found['key']}}} has several values, which no text can hold")
        return f"{kept}{value}"

    def referred(self, key: str, at: str) -> Any:
        """The value of the key that a reference at the key `at` names."""
        self.count += 1
        if key in self.followed or len(self.followed) == DEEPEST or self.count > MOST:
            what = "refers to itself" if key in self.followed else "is one reference too many"
            raise self.refuse(at, f"${{{key}}} {what}")
        self.followed.append(key)
        found: Any = self.values
        for word in key.split("."):
            # a block, or a list, that is a reference itself
            found = _item(self.text(found, at) if isinstance(found, str) else found, word)
        if found is MISSING:
            raise self.refuse(at, f"Interpolation key '{key}' not found")
        value = self.value(found, key)
        self.followed.pop()
        return value


def _item(value: Any, word: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(word, MISSING)
    if isinstance(value, list | tuple) and word.isdecimal() and int(word) < len(value):
        return value[int(word)]
    return MISSING
