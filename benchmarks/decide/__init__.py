"""Benchmark of the decision pace: alarm delays, false alarms, and the gain over policies that decide every window."""
