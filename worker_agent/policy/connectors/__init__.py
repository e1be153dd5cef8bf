"""Prototypes for EPLB interfaces that no vLLM release has yet. They are tested against the interfaces as published."""
