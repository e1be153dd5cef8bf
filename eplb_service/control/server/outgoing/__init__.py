"""Outgoing: plans and requests to ranks, heat to whoever listens."""
