"""Mutation testing of a room: ``python -m tools.mutation``."""
