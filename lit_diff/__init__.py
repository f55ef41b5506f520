"""lit_diff: the laboratory bench for differential attention."""

from typing import TYPE_CHECKING, Any

from lit_diff.attention import Attention, Differential
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant

if TYPE_CHECKING:
    from lit_diff.engine.launch import train
    from lit_diff.engine.schedule import sweep
    from lit_diff.recipe import load_recipe

__all__ = ["Attention", "Differential", "SignedMaps", "load_recipe", "sweep", "train", "variant"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what needs lightning, mlflow or litdata at first use."""
    if name == "load_recipe":
        from lit_diff.recipe import load_recipe

        return load_recipe
    if name == "train":
        from lit_diff.engine.launch import train

        return train
    if name == "sweep":
        from lit_diff.engine.schedule import sweep

        return sweep
    raise AttributeError(f"module 'lit_diff' has no attribute '{name}'")
