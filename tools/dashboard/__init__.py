"""The Grafana dashboard as code: ``python -m tools.dashboard`` writes it, and a test holds the file to it."""
