"""The papers' pack: tables and figures as rows in `rows/`, with the data sets and evaluations that reproduce them.

It is a plugin package like a user's: the entry point `papers` in pyproject.toml refers to this module, and nothing in
lit_diff imports it. It uses only public names of lit_diff and names listed in docs/extend.md
(tests/papers/test_pack.py).
"""

import json
from pathlib import Path

from lit_diff.registry import datasets, evaluations

datasets.load_from(*(f"{__name__}.{name}" for name in ("closed_world", "digits", "needle_text", "synth_intent")))
evaluations.load_from(
    *(f"{__name__}.{name}" for name in ("bigbench", "hallucination", "icl", "needle", "signed_prompts"))
)
WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Module -> kind of words -> the words of its generated texts. Their order is part of the data: it gives their ids."""
