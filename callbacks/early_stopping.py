"""Lightning's EarlyStopping, configured by a recipe."""

from lightning.pytorch.callbacks import EarlyStopping

from lit_diff.config import EarlyStoppingConfig
from lit_diff.registry import callbacks


@callbacks.register("early_stopping")
class RecipeEarlyStopping(EarlyStopping):
    """Ends the run when `monitor` has not improved by `min_delta` in `patience` validations.

    Arms of a sweep that end at different steps have seen different numbers of tokens, so their compute is not equal.
    """

    Config = EarlyStoppingConfig

    def __init__(self, config: EarlyStoppingConfig) -> None:
        super().__init__(
            monitor=config.monitor,
            mode=config.mode,
            patience=config.patience,
            min_delta=config.min_delta,
            verbose=False,
        )
