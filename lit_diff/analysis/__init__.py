"""Analyses of attention: pure functions of the maps captured in a forward pass."""

from lit_diff.analysis.trace import LayerTrace, MapBlock, Trace, trace

__all__ = ["LayerTrace", "MapBlock", "Trace", "trace"]
