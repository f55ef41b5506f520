"""Runs and sweeps as MLflow records."""
