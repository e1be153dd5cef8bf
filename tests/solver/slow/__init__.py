"""Slow, obvious twins of the solver's kernels."""
