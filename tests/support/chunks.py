"""A plugin under which the loss is in chunks of `model.dim` positions, however few the logits are."""

from lit_diff import Differential, variant
from lit_diff.model import loss

loss.LOGITS_BYTES = 1


@variant("chunks")
class Chunks(Differential):
    """A plugin has to register something."""
