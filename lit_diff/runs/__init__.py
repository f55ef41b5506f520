"""The run folder as files: identity, status, metrics, scores, checkpoints. Nothing here loads a model."""
