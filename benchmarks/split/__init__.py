"""Benchmark of the gain from splitting each step's tokens according to that step's counts, and of its cost."""
