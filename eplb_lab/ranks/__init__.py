"""Rank programs of the demo: layers balanced by an agent, and unbalanced layers to compare them with."""
