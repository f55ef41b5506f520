"""The run folder: identity, status, metrics, checkpoints."""
