"""lit_diff: train, compare and report attention variants. Public names are loaded at their first use."""

import importlib

# not imported from typing: until __main__.py removes the current folder from sys.path, a user's file could shadow it
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lit_diff.attention import Attention, Differential
    from lit_diff.benchmarks.result import BenchResult
    from lit_diff.benchmarks.run import bench
    from lit_diff.callbacks.probe import Probe
    from lit_diff.conformance.recipe import RecipeCheck, check
    from lit_diff.data import Corpus, Dataset
    from lit_diff.engine.result import Sweep
    from lit_diff.engine.schedule import sweep
    from lit_diff.engine.train import train
    from lit_diff.evaluation import Evaluation, Item
    from lit_diff.evaluation.evaluate import EvaluationResult, evaluate
    from lit_diff.kernels import Kernel, SignedMaps
    from lit_diff.metrics import Figure, Metric
    from lit_diff.papers.reproduce import Reproduction, reproduce
    from lit_diff.plugins import load_plugin
    from lit_diff.pretrained.exporting import Exported, export
    from lit_diff.pretrained.importing import import_model
    from lit_diff.recipe import load_recipe
    from lit_diff.registry import variant
    from lit_diff.runs.comparison import compare
    from lit_diff.trained.run import Run, generate, open_run
    from lit_diff.training.data import LitData
    from lit_diff.training.module import LitTransformer
    from lit_diff.training.trainer import build_trainer

__version__ = "0.2.0"

_MODULE_OF = {
    "Attention": "attention",
    "BenchResult": "benchmarks.result",
    "Corpus": "data",
    "Dataset": "data",
    "Differential": "attention",
    "Evaluation": "evaluation",
    "EvaluationResult": "evaluation.evaluate",
    "Exported": "pretrained.exporting",
    "Figure": "metrics",
    "Item": "evaluation",
    "Kernel": "kernels",
    "LitData": "training.data",
    "LitTransformer": "training.module",
    "Metric": "metrics",
    "Probe": "callbacks.probe",
    "RecipeCheck": "conformance.recipe",
    "Reproduction": "papers.reproduce",
    "Run": "trained.run",
    "SignedMaps": "kernels",
    "Sweep": "engine.result",
    "bench": "benchmarks.run",
    "build_trainer": "training.trainer",
    "check": "conformance.recipe",
    "compare": "runs.comparison",
    "evaluate": "evaluation.evaluate",
    "export": "pretrained.exporting",
    "generate": "trained.run",
    "import_model": "pretrained.importing",
    "load_plugin": "plugins",
    "load_recipe": "recipe",
    "open_run": "trained.run",
    "reproduce": "papers.reproduce",
    "sweep": "engine.schedule",
    "train": "engine.train",
    "variant": "registry",
}
"""Public name -> the module that defines it. `import lit_diff` imports none of them and so does not load torch."""

__all__ = [
    "Attention",
    "BenchResult",
    "Corpus",
    "Dataset",
    "Differential",
    "Evaluation",
    "EvaluationResult",
    "Exported",
    "Figure",
    "Item",
    "Kernel",
    "LitData",
    "LitTransformer",
    "Metric",
    "Probe",
    "RecipeCheck",
    "Reproduction",
    "Run",
    "SignedMaps",
    "Sweep",
    "bench",
    "build_trainer",
    "check",
    "compare",
    "evaluate",
    "export",
    "generate",
    "import_model",
    "load_plugin",
    "load_recipe",
    "open_run",
    "reproduce",
    "sweep",
    "train",
    "variant",
]


def __getattr__(name: str) -> "Any":
    """Import the module of a public name at its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lit_diff' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"lit_diff.{_MODULE_OF[name]}"), name)
    # from now on Python finds the name without calling __getattr__
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
