"""Grafana dashboard as code. ``python -m tools.dashboard`` writes the file, and a test checks that it is up to date."""
