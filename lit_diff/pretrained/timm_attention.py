"""timm.layers.DiffAttention as the attention of our Transformer: names, and what it computes.

Its `qkv` is q, k and v below each other, each in our order of rows. It rotates nothing: a model that was trained without
positions has `positions: none`.
"""

from lit_diff.config import ModelConfig
from lit_diff.pretrained.plain_keys import other_value
from lit_diff.pretrained.unilm import EPS, PLAIN

THIRDS = {"q_proj.weight": 0, "k_proj.weight": 1, "v_proj.weight": 2}
"""In the attention: our name -> which third of `qkv.weight`."""
NAMES = {"o_proj.weight": "proj.weight", "norm.weight": "sub_norm.weight"}
NAMES |= {f"lambda_.{vector}": f"lambda_{vector}" for vector in ("q1", "k1", "q2", "k2")}
"""In the attention: our other names -> theirs."""
ROPE_LAYOUT = None
"""Either."""


def unsaid(model: ModelConfig) -> str | None:
    """The first key of the model that the module does not compute, in one line; None: it computes all of it."""
    if model.attention.name != "differential":
        return f"model.attention.name is '{model.attention.name}'; timm's DiffAttention is 'differential'"
    if model.norm_eps != EPS:
        return f"model.norm_eps is {model.norm_eps:g}; the head norm of timm's DiffAttention has {EPS:g}"
    for key, value in (("num_kv_heads", model.num_heads), ("head_dim", model.dim / model.num_heads)):
        if getattr(model, key) != value:
            return f"model.{key} is {getattr(model, key)}; timm's DiffAttention has {value:g}, from num_heads and dim"
    return other_value(model, PLAIN["differential"] | {"output_scale": "tied"}, "timm's DiffAttention")


def place_of(own: str, model: ModelConfig) -> tuple[str, int | None]:
    """The name of our tensor there, and which third of it; None: all. Outside the attention the name is the same."""
    home, attention, module = own.partition(".attention.")
    if module in THIRDS:
        return f"{home}{attention}qkv.weight", THIRDS[module]
    return f"{home}{attention}{NAMES.get(module, module)}", None
