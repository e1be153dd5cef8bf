"""Grafana dashboard as code: ``python -m tools.dashboard`` writes the file, and a test compares it."""
