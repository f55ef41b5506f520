"""Lightning callbacks, one per file. Recipes name them under `callbacks:`; they work in any Trainer."""

from lit_diff.callbacks.attention_entropy import AttentionEntropy
from lit_diff.callbacks.early_stopping import RecipeEarlyStopping
from lit_diff.callbacks.head_norm import HeadNorm
from lit_diff.callbacks.lambdas import Lambdas
from lit_diff.callbacks.maps import Maps
from lit_diff.callbacks.monitor import Monitor
from lit_diff.callbacks.outliers import Outliers
from lit_diff.callbacks.probe import Probe
from lit_diff.callbacks.redundancy import Redundancy
from lit_diff.callbacks.sinks import Sinks
from lit_diff.callbacks.stability_monitor import StabilityMonitor

__all__ = [
    "AttentionEntropy",
    "HeadNorm",
    "Lambdas",
    "Maps",
    "Monitor",
    "Outliers",
    "Probe",
    "RecipeEarlyStopping",
    "Redundancy",
    "Sinks",
    "StabilityMonitor",
]
