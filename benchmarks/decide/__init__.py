"""Benchmark of the decision pace: alarm delays, false alarms, and the gain over deciding once per window."""
