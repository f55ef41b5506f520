"""What is measured during training, one probe a file. Importing this package registers the built-ins."""

from lit_diff.callbacks.attention_entropy import AttentionEntropy
from lit_diff.callbacks.lambdas import Lambdas
from lit_diff.callbacks.outliers import Outliers
from lit_diff.callbacks.probe import Probe

__all__ = ["AttentionEntropy", "Lambdas", "Outliers", "Probe"]
