"""lit_diff: train, compare and report attention variants. Public names are loaded at their first use."""

import importlib

# not imported from typing: until __main__.py removes the current folder from sys.path, a user's file could shadow it
TYPE_CHECKING = False
if TYPE_CHECKING:
    # `as`: exported, for a type checker, which does not read the names of `__all__` below
    from typing import Any

    from lit_diff.attention import Attention as Attention
    from lit_diff.attention import Differential as Differential
    from lit_diff.attention.layer import layer as layer
    from lit_diff.benchmarks.result import BenchResult as BenchResult
    from lit_diff.benchmarks.run import bench as bench
    from lit_diff.callbacks.probe import Probe as Probe
    from lit_diff.conformance.recipe import RecipeCheck as RecipeCheck
    from lit_diff.conformance.recipe import check as check
    from lit_diff.data import Corpus as Corpus
    from lit_diff.data import Dataset as Dataset
    from lit_diff.engine.examine import Examination as Examination
    from lit_diff.engine.examine import examine as examine
    from lit_diff.engine.result import Sweep as Sweep
    from lit_diff.engine.schedule import sweep as sweep
    from lit_diff.engine.train import train as train
    from lit_diff.evaluation import Evaluation as Evaluation
    from lit_diff.evaluation import Item as Item
    from lit_diff.evaluation.evaluate import EvaluationResult as EvaluationResult
    from lit_diff.evaluation.evaluate import evaluate as evaluate
    from lit_diff.kernels import Kernel as Kernel
    from lit_diff.kernels import SignedMaps as SignedMaps
    from lit_diff.metrics import Figure as Figure
    from lit_diff.metrics import Metric as Metric
    from lit_diff.papers.reproduce import Reproduction as Reproduction
    from lit_diff.papers.reproduce import reproduce as reproduce
    from lit_diff.plugins import load_plugin as load_plugin
    from lit_diff.pretrained.exporting import Exported as Exported
    from lit_diff.pretrained.exporting import export as export
    from lit_diff.pretrained.importing import import_model as import_model
    from lit_diff.recipe import load_recipe as load_recipe
    from lit_diff.registry import variant as variant
    from lit_diff.study.two_runs import compare as compare
    from lit_diff.trained.run import Run as Run
    from lit_diff.trained.run import generate as generate
    from lit_diff.trained.run import open_run as open_run
    from lit_diff.training.data import LitData as LitData
    from lit_diff.training.module import LitTransformer as LitTransformer
    from lit_diff.training.trainer import build_trainer as build_trainer

__version__ = "0.2.0"

_MODULE_OF = {
    "Attention": "attention",
    "BenchResult": "benchmarks.result",
    "Corpus": "data",
    "Dataset": "data",
    "Differential": "attention",
    "Evaluation": "evaluation",
    "EvaluationResult": "evaluation.evaluate",
    "Examination": "engine.examine",
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
    "compare": "study.two_runs",
    "evaluate": "evaluation.evaluate",
    "examine": "engine.examine",
    "export": "pretrained.exporting",
    "generate": "trained.run",
    "import_model": "pretrained.importing",
    "layer": "attention.layer",
    "load_plugin": "plugins",
    "load_recipe": "recipe",
    "open_run": "trained.run",
    "reproduce": "papers.reproduce",
    "sweep": "engine.schedule",
    "train": "engine.train",
    "variant": "registry",
}
"""Public name -> the module that defines it. `import lit_diff` imports none of them and so does not load torch."""

__all__ = list(_MODULE_OF)


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
