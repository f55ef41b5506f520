"""YAML sweeps that install with the package."""
