"""Adapters: engines' live MoE layers as the agent takes them, and the hooks that make its steps."""
