"""Benchmark of the cost of a layer switch for the model: ``make bench-switch``."""
