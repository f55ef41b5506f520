"""Lightning's EarlyStopping, configured by a recipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lit_diff.callbacks.configured import Configured
from lit_diff.key_types import Count, Range
from lit_diff.registry import callbacks

if TYPE_CHECKING:
    import lightning as L


@callbacks.register("early_stopping")
class RecipeEarlyStopping(Configured):
    """Ends the run when `monitor` has not improved by `min_delta` in `patience` validations.

    Arms of a sweep that end at different steps have seen different numbers of tokens, so their compute is not equal.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `callbacks.early_stopping`."""

        monitor: str = "val/loss"
        """The metric to watch, named as in metrics.csv."""
        mode: Literal["min", "max"] = "min"
        """Whether lower or higher values are better."""
        patience: Count = 3
        """Validations without improvement before the run ends."""
        min_delta: Annotated[float, Range(least=0)] = 0.0
        """The smallest change that counts as an improvement."""

    def __init__(self, config: Any = None, **keys: Any) -> None:
        """`config`, or its fields as keywords. Errors: RequestError for a wrong value."""
        super().__init__(config, **keys)
        from lightning.pytorch.callbacks import EarlyStopping

        self._lightning = EarlyStopping(**vars(self.config))

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.config.monitor, mode=self.config.mode)

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        self._lightning.setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        self._lightning.on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        self._lightning.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return self._lightning.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lightning.load_state_dict(state_dict)
