"""Decisions: their inputs, the threads that compute them, and offering the resulting plans to the ranks."""
