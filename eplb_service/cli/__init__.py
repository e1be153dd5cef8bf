"""The command ``eplb``: serve, solve, replay, demo, and what operators ask of a running service."""
