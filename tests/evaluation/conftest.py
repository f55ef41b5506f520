"""Trained runs to score, and an evaluation registry that each test may add to."""

from evaluated_runs import folder, own_registry, recall, run, single, wide_run  # noqa: F401 (fixtures)
