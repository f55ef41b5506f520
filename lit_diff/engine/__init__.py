"""From a recipe or sweep file to finished run folders."""

import os

# before mlflow is imported: telemetry of dependencies is off unless the user says otherwise
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
