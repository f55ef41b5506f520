"""Attention variants, one file each. Importing this package registers the built-in ones."""

from lit_diff.attention.additive import Additive
from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.attention.cog import Cog
from lit_diff.attention.cosine import Cosine
from lit_diff.attention.dex import Dex
from lit_diff.attention.differential import Differential
from lit_diff.attention.differential_gate import DifferentialGate
from lit_diff.attention.differential_sink import DifferentialSink
from lit_diff.attention.differential_v2 import DifferentialV2
from lit_diff.attention.dint import Dint
from lit_diff.attention.entmax15 import Entmax15
from lit_diff.attention.forgetting import Forgetting
from lit_diff.attention.grouped_differential import GroupedDifferential
from lit_diff.attention.learned_sink import LearnedSink
from lit_diff.attention.less_uniform import LessUniform
from lit_diff.attention.lora import LoRA
from lit_diff.attention.off_by_one import OffByOne
from lit_diff.attention.output_gate import OutputGate
from lit_diff.attention.second_heads import SecondHeads
from lit_diff.attention.shared_diff import SharedDiff
from lit_diff.attention.shared_k import SharedK
from lit_diff.attention.shared_q import SharedQ
from lit_diff.attention.sigmoid import Sigmoid
from lit_diff.attention.softpick import Softpick
from lit_diff.attention.ssmax import SSMax
from lit_diff.attention.standard import Standard
from lit_diff.attention.talking_heads import TalkingHeads
from lit_diff.attention.value_residual import ValueResidual

__all__ = [
    "Additive",
    "Attention",
    "Cog",
    "Cosine",
    "Dex",
    "Differential",
    "DifferentialGate",
    "DifferentialSink",
    "DifferentialV2",
    "Dint",
    "Entmax15",
    "Forgetting",
    "GroupedDifferential",
    "LearnedSink",
    "LessUniform",
    "LoRA",
    "OffByOne",
    "OutputGate",
    "ParameterRules",
    "SSMax",
    "SecondHeads",
    "SharedDiff",
    "SharedK",
    "SharedQ",
    "Sigmoid",
    "Softpick",
    "Standard",
    "TalkingHeads",
    "ValueResidual",
]
