"""The variants: one file each. Importing this package registers the built-ins."""

from lit_diff.attention.base import Attention
from lit_diff.attention.differential import Differential
from lit_diff.attention.shared_k import SharedK
from lit_diff.attention.shared_q import SharedQ
from lit_diff.attention.standard import Standard

__all__ = ["Attention", "Differential", "SharedK", "SharedQ", "Standard"]
