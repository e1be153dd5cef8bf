"""Decisions: their inputs, the planner threads that compute them, and the offering of plans to the ranks."""
