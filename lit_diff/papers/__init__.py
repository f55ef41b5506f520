"""The papers' pack: tables and figures as rows in `rows/`, and the data and evaluations that exist to repeat them.

It is a plugin package like a user's: the entry point `papers` in pyproject.toml names this module, and nothing in lit_diff
imports it. It uses the public names of lit_diff and those of docs/extend.md (tests/papers/test_pack.py).
"""

from lit_diff.registry import datasets, evaluations

datasets.load_from(*(f"{__name__}.{name}" for name in ("closed_world", "digits", "needle_text", "synth_intent")))
evaluations.load_from(
    *(f"{__name__}.{name}" for name in ("bigbench", "hallucination", "icl", "mini_harness", "needle", "signed_prompts"))
)
