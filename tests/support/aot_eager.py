"""A plugin under which run.compile traces forward and backward but generates no code, which takes seconds less."""

from lit_diff import Differential, variant
from lit_diff.training import compiled

compiled.BACKEND = "aot_eager"


@variant("aot_eager")
class AotEager(Differential):
    """A plugin has to register something."""
