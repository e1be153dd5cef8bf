"""Decisions: what they are made on, the threads that make them, and the offer of what was decided."""
