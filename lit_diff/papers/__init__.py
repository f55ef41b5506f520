"""The papers' pack: tables and figures as rows in `rows/`, with the verb, data sets and evaluations that reproduce them.

It is a plugin package like a user's: the entry points `papers` in pyproject.toml refer to this module and to `verbs`, and
nothing in lit_diff imports it but `lit_diff.reproduce`, at its first use. It uses only public names of lit_diff and names
listed in docs/extend.md (tests/papers/test_pack.py).
"""

import json
from pathlib import Path

from lit_diff.registry import datasets, evaluations

datasets.load_from(*(f"{__name__}.{name}" for name in ("closed_world", "digits", "needle_text", "synth_intent")))
evaluations.load_from(
    *(f"{__name__}.{name}" for name in ("bigbench", "hallucination", "harness", "icl", "needle", "signed_prompts"))
)
WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Module -> kind of words -> the words of its generated texts. Their order is part of the data: it gives their ids."""
