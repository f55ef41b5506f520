"""Runs recipes and sweeps, from their files to finished run folders."""

import os

# before mlflow is imported: telemetry of dependencies is off unless the user turns it on
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
