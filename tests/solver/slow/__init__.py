"""Slow, simple twins of the solver's kernels."""
