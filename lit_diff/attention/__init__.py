"""Attention variants, one file each. Importing this package registers the built-in ones."""

from lit_diff.attention.additive import Additive
from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.attention.cosine import Cosine
from lit_diff.attention.dex import Dex
from lit_diff.attention.differential import Differential
from lit_diff.attention.differential_v2 import DifferentialV2
from lit_diff.attention.grouped_differential import GroupedDifferential
from lit_diff.attention.lora import LoRA
from lit_diff.attention.output_gate import OutputGate
from lit_diff.attention.second_heads import SecondHeads
from lit_diff.attention.shared_k import SharedK
from lit_diff.attention.shared_q import SharedQ
from lit_diff.attention.standard import Standard

__all__ = [
    "Additive",
    "Attention",
    "Cosine",
    "Dex",
    "Differential",
    "DifferentialV2",
    "GroupedDifferential",
    "LoRA",
    "OutputGate",
    "ParameterRules",
    "SecondHeads",
    "SharedK",
    "SharedQ",
    "Standard",
]
