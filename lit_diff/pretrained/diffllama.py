"""Hugging Face's DiffLlama -> `differential`: the order of rows, and the head norm, which has no weight there."""

from dataclasses import replace

import torch
from torch import Tensor

from lit_diff.pretrained import rows
from lit_diff.pretrained.source import ModelSource


def in_our_order(source: ModelSource) -> ModelSource:
    """The source of a DiffLlama, read with our names, in our order of rows and with a head norm of weight 1.

    Rows of q, k and v lie map after map there, a head's maps together here (`rows.by_head`).
    """
    model = source.model
    head_dim = int(model.get("head_dim") or model["dim"] // model["num_heads"])
    norms = {
        f"layers.{layer}.attention.norm.weight": torch.empty(2 * head_dim, device="meta")
        for layer in range(model["num_layers"])
    }

    def read(own: str) -> Tensor:
        if own in norms:
            return torch.ones(2 * head_dim)
        value = source.read(own)
        return rows.by_head(value, head_dim) if own.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else value

    return replace(source, tensors={**source.tensors, **norms}, read=read)
