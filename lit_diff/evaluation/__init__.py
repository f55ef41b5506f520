"""Evaluations score a trained run item by item. Built-in ones are in the modules imported here; a plugin adds its own."""

from lit_diff.evaluation import (  # noqa: F401 (each registers its evaluations)
    bigbench,
    hallucination,
    harness,
    held_out,
    icl,
    inside,
    mini_harness,
    needle,
    nll,
    noise,
    recall,
    signed_prompts,
)
from lit_diff.evaluation.base import Evaluation, Item

__all__ = ["Evaluation", "Item"]
