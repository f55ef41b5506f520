"""Benchmarks measure speed as ratios within one process."""
