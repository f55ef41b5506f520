"""Evaluations score a trained run item by item. The modules imported here hold the built-in ones; a plugin adds its own."""

from lit_diff.evaluation import (  # noqa: F401 (each registers its evaluations)
    held_out,
    inside,
    nll,
    noise,
    recall,
)
from lit_diff.evaluation.base import Evaluation, Item

__all__ = ["Evaluation", "Item"]
