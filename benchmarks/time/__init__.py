"""Benchmark of planning for time against balancing tokens, with a measured cost curve: ``make bench-time``."""
