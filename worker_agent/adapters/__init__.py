"""Adapters: present each engine's MoE layers to the agent, and hook the agent into the engine."""
