"""Benchmark of the number of ranks that one service can handle, and of its CPU time and memory per rank."""
