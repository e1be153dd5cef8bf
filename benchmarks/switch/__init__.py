"""Benchmark of what a layer switch costs the model: ``make bench-switch``."""
