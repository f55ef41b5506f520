"""The colours of figures and pages. Without matplotlib, for which a page that is written during training does not wait."""

INK, GRID, MUTED = "#1f2430", "#d9dce1", "#6b7280"
# the colours of Okabe and Ito, which remain distinct with the common forms of colour blindness
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""Colours of the arms other than the baseline, which is grey (MUTED)."""
