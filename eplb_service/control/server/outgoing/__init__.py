"""Outgoing messages: plans and requests to ranks, and heat to watchers."""
