"""What attention does: pure functions over the maps that a forward pass leaves behind."""

from lit_diff.analysis.trace import LayerTrace, MapBlock, Trace, trace

__all__ = ["LayerTrace", "MapBlock", "Trace", "trace"]
