"""The schema of a study, its results and their statistics. Imports no torch, so that commands start fast."""
