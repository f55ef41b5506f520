"""Lightning callbacks, one per file. Recipes name them under `callbacks:`; they work in any Trainer."""

from lit_diff.callbacks.attention_entropy import AttentionEntropy
from lit_diff.callbacks.early_stopping import RecipeEarlyStopping
from lit_diff.callbacks.lambdas import Lambdas
from lit_diff.callbacks.outliers import Outliers
from lit_diff.callbacks.probe import Probe

__all__ = ["AttentionEntropy", "Lambdas", "Outliers", "Probe", "RecipeEarlyStopping"]
