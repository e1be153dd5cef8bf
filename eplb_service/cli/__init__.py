"""Command ``eplb``: serve, solve, replay and demo, and the commands that operate a running service."""
