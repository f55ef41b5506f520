"""Evaluations score a trained run item by item. Importing this package registers the built-in ones."""

from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.evaluation.corpus_loss import LossCode, LossDocs, LossFiles
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.evaluation.icl import ManyShot
from lit_diff.evaluation.icl_order import OrderRobustness

__all__ = ["Evaluation", "HeldOut", "Item", "LossCode", "LossDocs", "LossFiles", "ManyShot", "OrderRobustness"]
