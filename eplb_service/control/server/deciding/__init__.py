"""Decisions: their inputs, the threads that compute them, and the offer of the resulting plans."""
