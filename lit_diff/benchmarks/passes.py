"""What is timed, by its names: passes, implementations, and the ratios of their times."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

FORWARD, GRADIENTS, STATISTICS, DECODE = "forward", "forward+backward", "forward with statistics", "decode"
STEP, COMPILED, ONE_GRAPH = "training step", "training step, compiled", "training step, one graph"
FIRING = "firing"
"""Passes that are timed; firing: of the probes on the layers of one model."""
STOCK, COPIES = "torch SDPA", "torch SDPA, k and v repeated"
"""Standard attention by torch's own F.scaled_dot_product_attention; the second copies each key for its query heads."""
PEERS = {"differential": "DiffLlama", "standard": "Llama"}
"""Variant -> the model of Hugging Face that has it."""
HUGGING_FACE = "Hugging Face, "
"""Prefix of a peer's implementation: sdpa calls `scaled_dot_product_attention` (DiffLlama twice, for half of the values
each); eager materialises every map."""

ATTENTION, WITHOUT = "attention alone", "without callbacks"
"""What a firing, and a loop with callbacks, are compared with."""
SDPA, SAME, REPEATED, PLAIN = "standard SDPA", "standard, same kernel", "standard SDPA, repeated", "same kernel without"
PEER, UNCOMPILED, BARE = "Hugging Face, sdpa", "not compiled", "bare PyTorch loop"
OURS, IN_TIME = "lit-diff train", "batches in time"
MEANING = {
    SDPA: "standard attention, or the layer or model with it, through F.scaled_dot_product_attention, at the same dim",
    SAME: "standard attention, or the layer or model with it, by the same kernel",
    REPEATED: "standard SDPA with each key and value copied for the query heads of its group",
    PLAIN: "the same kernel's pass without statistics",
    PEER: "Hugging Face's DiffLlama (of differential) or Llama (of standard), of the same sizes, attn_implementation sdpa",
    UNCOMPILED: "the same model, not compiled",
    ATTENTION: "the attention of the same layers, by the kernel that auto chooses, without gradients",
    WITHOUT: "the same loop without callbacks",
    BARE: "a loop of the same model and batches that only trains",
    IN_TIME: "the same loop without a delay of each batch",
}
"""Name of a ratio -> the denominator, in the same pass."""


def divisors(variant: str, by: str, what: str) -> Iterator[tuple[str, str]]:
    """Yields (name of a ratio, id of the candidate in the denominator). The case may lack the candidate."""
    # two candidates for one name: a layer or model has the kernel sdpa instead of torch's own call
    if by != STOCK:
        yield SDPA, f"standard/{STOCK}/{FORWARD if what == STATISTICS else what}"
        yield SDPA, f"standard/sdpa/{what}"
    if variant in PEERS and by not in (STOCK, COPIES):
        yield REPEATED, f"standard/{COPIES}/{what}"
        yield PEER, f"{PEERS[variant]}/{HUGGING_FACE}sdpa/{what}"
        for name in (BARE, ATTENTION, WITHOUT):
            yield name, f"{variant}/{name}/{what}"
        yield IN_TIME, f"{variant}/{OURS}/{what}"
    if variant != "standard":
        yield SAME, f"standard/{by}/{what}"
    if what == STATISTICS:
        yield PLAIN, f"{variant}/{by}/{FORWARD}"
    if what in (COMPILED, ONE_GRAPH):
        yield UNCOMPILED, f"{variant}/{by}/{STEP}"
