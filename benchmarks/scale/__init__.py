"""Benchmark of how many ranks one service can handle, and of its CPU time and memory per rank."""
