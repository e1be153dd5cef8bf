"""Benchmark of the decision pace: alarm delays, false alarms, and the gain over one decision per window."""
