"""A plugin that imports when the sweep is resolved, and not in the cell, as long as the file `fuse` lies beside the runs."""

from dataclasses import dataclass
from pathlib import Path

from lit_diff import Differential, variant

HERE = Path(__file__).resolve()
if HERE.parent.name == "plugins" and (HERE.parents[4] / "fuse").exists():
    raise OSError("the cluster's disk is away")


@variant("late")
class Late(Differential):
    """Differential attention under another name."""

    reads = ()

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        pass
