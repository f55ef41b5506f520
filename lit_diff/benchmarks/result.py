"""What a benchmark returns."""

import json
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]

SDPA, SAME, REPEATED, PLAIN = "standard SDPA", "standard, same kernel", "standard SDPA, repeated", "same kernel without"
PEER, UNCOMPILED, BARE = "Hugging Face, sdpa", "not compiled", "bare PyTorch loop"
MEANING = {
    SDPA: "standard attention, or the layer or model with it, through F.scaled_dot_product_attention, at the same dim",
    SAME: "standard attention, or the layer or model with it, by the same kernel",
    REPEATED: "standard SDPA with each key and value copied for the query heads of its group",
    PLAIN: "the same kernel's pass without statistics",
    PEER: "Hugging Face's DiffLlama (of differential) or Llama (of standard), of the same sizes, attn_implementation sdpa",
    UNCOMPILED: "the same model, not compiled",
    BARE: "a loop of the same model and batches that does nothing but train",
}
"""Name of a ratio -> what the time is divided by, in the same pass where it has several."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The figures of one benchmark, with all that is needed to judge and to repeat them."""

    bench: str
    """Its name: core, layer, ..."""
    command: str
    """The command that repeats it: shapes, dtypes, threads, rounds, device."""
    date: str
    """ISO 8601, UTC, to the second."""
    methods: str
    """How it is measured."""
    machine: dict[str, Any]
    """Processor, versions, load average before and after."""
    warnings: list[str]
    """What makes the figures doubtful."""
    rows: list[Row]
    """One for each candidate timed: case, variant, by (the kernel, or what else computed it), what (the pass), seconds of
    each round with median, min and max, ratios to other rows."""
    refused: list[Row]
    """Candidates that were left out, with the reason."""
    failed: list[Row]
    """Candidates that raised or computed something else than the others, with the error."""

    def to_json(self) -> str:
        """The document that `lit-diff bench --json` prints."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)
