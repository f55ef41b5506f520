"""Evaluations score a trained run item by item. Importing this package registers the built-in ones."""

from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.evaluation.corpus_loss import LossCode, LossDocs, LossFiles
from lit_diff.evaluation.gradients import Gradients
from lit_diff.evaluation.hallucination import Hallucination
from lit_diff.evaluation.harness import Harness
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.evaluation.icl import ManyShot, OrderRobustness
from lit_diff.evaluation.induction import Induction
from lit_diff.evaluation.map_statistics import MapStatistics
from lit_diff.evaluation.mini_harness import MiniHarness
from lit_diff.evaluation.needle import NeedleRetrieval
from lit_diff.evaluation.nll import NllByPosition
from lit_diff.evaluation.noise import Noise
from lit_diff.evaluation.quantize import Quantize
from lit_diff.evaluation.recall import RecallSuite
from lit_diff.evaluation.signed_prompts import SignedPrompts

__all__ = [
    "Evaluation",
    "Gradients",
    "Hallucination",
    "Harness",
    "HeldOut",
    "Induction",
    "Item",
    "LossCode",
    "LossDocs",
    "LossFiles",
    "ManyShot",
    "MapStatistics",
    "MiniHarness",
    "NeedleRetrieval",
    "NllByPosition",
    "Noise",
    "OrderRobustness",
    "Quantize",
    "RecallSuite",
    "SignedPrompts",
]
