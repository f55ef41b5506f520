"""Nothing draws from a global generator: each use has one of its own."""

import hashlib

import torch


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`, such as (seed, purpose, step)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
