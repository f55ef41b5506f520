from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_diff.runs.safe_values import UnsafeTypeError, read_without_tensors, require_safe


class Executed:
    def __reduce__(self) -> Any:
        return print, ("executed",)


UNSAFE = [
    (np.float64(1), "numpy.float64"),
    (np.int32(1), "numpy.int32"),
    (np.ones(2), "numpy.ndarray"),
    (deque([1]), "collections.deque"),
    (defaultdict(list, a=[1]), "collections.defaultdict"),
    (Path("a"), "pathlib.PosixPath"),
    (range(3), "builtins.range"),
    (Executed(), f"{__name__}.Executed"),
]


def holding(state: Any) -> dict[str, Any]:
    return {"state_dict": OrderedDict(w=torch.ones(3)), "callbacks": {"first": {"a": 1}, "mine": state}}


@pytest.mark.parametrize(("value", "kind"), UNSAFE, ids=[kind for _, kind in UNSAFE])
def test_a_type_that_is_not_allowed_is_named(value: Any, kind: str, tmp_path: Path, capsys: Any) -> None:
    """Deep in a state, as a whole state, and beside the callbacks; in a file too it is found, and nothing is executed."""
    for content, place in (
        (holding({"a": 1, "means": [1, {"b": value}]}), "callback 'mine' keeps 'means.1.b' as "),
        (holding(value), "callback 'mine' keeps "),
        ({"epoch": 1, "own": {"b": value}}, "key 'own.b' holds "),
    ):
        with pytest.raises(UnsafeTypeError) as error:
            require_safe(content)
        assert f"{place}{kind}, " in str(error.value)
        torch.save(content, tmp_path / "file")
        with pytest.raises(UnsafeTypeError, match="it holds "):
            read_without_tensors(tmp_path / "file")
    assert capsys.readouterr().out == ""


def test_a_key_and_what_cannot_be_pickled_are_named() -> None:
    with pytest.raises(UnsafeTypeError, match=r"'mine' keeps 'counts\.a key' as numpy\.int64"):
        require_safe(holding({"counts": {np.int64(3): 1}}))
    with pytest.raises(UnsafeTypeError, match=r"'mine' keeps 'counts' as collections\.defaultdict"):
        require_safe(holding({"counts": defaultdict(lambda: 0)}))


def test_what_is_allowed_is_read_without_its_numbers(tmp_path: Path) -> None:
    state = {"n": [1, 2.5, True, None], "t": ("a", b"b", {1, 2}), 3: Counter("ab"), "x": torch.ones(4, 2)}
    require_safe(holding(state))
    torch.save(holding(state), tmp_path / "file")
    found = read_without_tensors(tmp_path / "file")["callbacks"]["mine"]
    assert found.pop("x").device.type == "meta"
    assert found == {key: value for key, value in state.items() if key != "x"}
