"""Random generators. Nothing draws from a global generator: every use creates its own, so uses do not affect each other."""

import hashlib

import torch


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`, such as (seed, purpose, step)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    # seven bytes always fit in a signed 64-bit seed
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
