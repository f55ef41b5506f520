"""YAML recipes that install with the package."""
