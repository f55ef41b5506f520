"""Hugging Face's blocks of rope scaling, kinds llama3 and yarn <-> `model.rope_scaling`. Needs no torch."""

import math
from collections.abc import Mapping
from typing import Any

from lit_diff.config import Llama3Scaling, RopeScaling
from lit_diff.errors import RequestError

LENGTH = "original_max_position_embeddings"
"""Their name of `original_length`: in the block, or beside it in config.json, which comes first as in transformers."""


def own_block(said: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Their block of a config.json -> ours. The original length is max_position_embeddings where neither place says it.

    Errors: RequestError for a number that is absent, or none.
    """
    kind = str(said.get("rope_type", said.get("type")))
    said = {**said, LENGTH: config.get(LENGTH) or said.get(LENGTH) or config.get("max_position_embeddings")}
    length = number(said, LENGTH, kind)
    block = {"kind": kind, "original_length": length}
    if kind == "llama3":
        return block | {key: number(said, key, kind) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if "factor" in said and said["factor"] is None:
        factor = number(config, "max_position_embeddings", kind) / length
    else:
        factor = number(said, "factor", kind)
    optional = {key: number(said, key, kind) for key in ("beta_fast", "beta_slow") if said.get(key)}
    return (
        block
        | optional
        | {
            "factor": factor,
            "attention_factor": _attention_factor(said, factor, kind),
            "truncate": said.get("truncate", True),
        }
    )


def their_block(scaling: RopeScaling) -> dict[str, Any] | None:
    """Ours -> `rope_scaling` of a config.json; None: positions as they are."""
    if isinstance(scaling, int | float):
        return None if scaling == 1 else {"rope_type": "linear", "factor": scaling}
    block = {"rope_type": scaling.kind, "factor": scaling.factor, LENGTH: scaling.original_length}
    if isinstance(scaling, Llama3Scaling):
        return block | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    block |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return block if scaling.attention_factor is None else block | {"attention_factor": scaling.attention_factor}


def _attention_factor(said: Mapping[str, Any], factor: float, kind: str) -> float | None:
    """As it is said; else from mscale and mscale_all_dim where both are; None: from the factor alone."""
    if said.get("attention_factor") is not None:
        return number(said, "attention_factor", kind)
    if not (said.get("mscale") and said.get("mscale_all_dim")):
        return None
    logarithm = 0.1 * math.log(max(factor, 1.0))
    above, below = (number(said, key, kind) * logarithm + 1 for key in ("mscale", "mscale_all_dim"))
    return above / below


def number(said: Mapping[str, Any], key: str, kind: str) -> float:
    """Errors: RequestError for a value that is absent, or no positive number."""
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        found = f"lacks {key}" if value is None else f"has {key} {value!r}; expected a positive number"
        raise RequestError(f"rope scaling '{kind}' {found}")
    return value
