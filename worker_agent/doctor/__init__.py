"""Checks an engine's environment before it serves with the agent: ``eplb-agent-doctor``, a few minutes at most."""
