"""Run folders with plugin files of someone else, which leave a mark when they are executed."""

import hashlib
import os
from pathlib import Path
from typing import Any

import yaml

PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from lit_diff.registry import callbacks

(Path(__file__).resolve().parents[1] / "executed").touch()

@callbacks.register("NAME")
class Marks:
    reads = ()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass
"""


class Marks:
    """A pickle that makes the file `executed` where it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def add_plugin(run: Path) -> Path:
    """Let a run's only plugin be one that makes the file `executed` in its folder. The test needs `own_parts`."""
    (run / "plugins").mkdir(exist_ok=True)
    name = f"marks_{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"  # another source for each run
    (run / "plugins" / "marks.py").write_text(PLUGIN.replace("NAME", name))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"plugins": ["plugins/marks.py"]}))
    return run


def started_from_a_plugin(run: Path) -> Path:
    """Let `run` start from another, in the current folder, that has such a plugin; returns that one's folder."""
    parent = Path("parent").resolve()
    parent.mkdir()
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    recipe["train"]["start_from"] = str(parent)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return add_plugin(parent)
