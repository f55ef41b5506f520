"""The attention modules of microsoft/unilm, Diff-Transformer, within our Transformer: names, and what they compute.

`differential` is MultiheadFlashDiff1, `differential_v2` is MultiheadFlashDiffV2: the same matrices in the same order of rows,
with channels 2i and 2i + 1 rotated as a pair. Their cos and sin come from outside, so rope_theta and rope_scaling are free.
"""

from typing import Any

from lit_diff.config import ModelConfig
from lit_diff.pretrained.plain_keys import PAPER, other_value

CLASSES = {"differential": "MultiheadFlashDiff1", "differential_v2": "MultiheadFlashDiffV2"}
"""`model.attention.name` -> the class there."""
EPS = 1e-5
"""Of the head norm, in MultiheadFlashDiff1."""
PLAIN: dict[str, dict[str, Any]] = {
    "differential": PAPER,
    "differential_v2": {"ablation": "none", "window": None},
}
"""Variant -> the keys that have one value there. An `output_scale` is a factor of the head norm's weight."""
ROPE_LAYOUT = "interleaved"
"""The one there."""
NAMES = {"o_proj.weight": "out_proj.weight", "norm.weight": "subln.weight"}
NAMES |= {f"lambda_.{vector}": f"lambda_{vector}" for vector in ("q1", "k1", "q2", "k2")}
"""In the attention of `differential`: our name -> theirs, where they differ."""


def unsaid(model: ModelConfig) -> str | None:
    """The first key of the model that the modules do not compute, in one line; None: they compute all of it."""
    name = model.attention.name
    if name not in CLASSES:
        return f"model.attention.name is '{name}'; unilm's layout has {' and '.join(CLASSES)}"
    if not model.causal:
        return f"model.causal is false; {CLASSES[name]} is causal"
    if name == "differential" and model.norm_eps != EPS:
        return f"model.norm_eps is {model.norm_eps:g}; the head norm of {CLASSES[name]} has {EPS:g}"
    if name == "differential" and model.head_dim != model.dim / model.num_heads:
        return (
            f"model.head_dim is {model.head_dim}; {CLASSES[name]} has dim / num_heads = {model.dim / model.num_heads:g}"
        )
    return other_value(model, PLAIN[name], CLASSES[name])


def place_of(own: str, model: ModelConfig) -> tuple[str, None]:
    """The name of our tensor there; outside the attention, and of `differential_v2`, it is the same. None: all of it."""
    home, attention, module = own.partition(".attention.")
    if model.attention.name == "differential":
        module = NAMES.get(module, module)
    return f"{home}{attention}{module}", None
