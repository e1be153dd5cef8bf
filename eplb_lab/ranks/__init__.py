"""Rank programs of the demo: layers balanced by an agent, and unbalanced layers for comparison."""
