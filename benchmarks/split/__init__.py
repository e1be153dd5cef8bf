"""Benchmark of the gain and the cost of splitting each step's tokens according to that step's counts."""
