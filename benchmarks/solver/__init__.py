"""Benchmark of the solver against other balancers on the same heat."""
