"""Comparison of this project's policies with inference engines' balancers, on the same heat.

Each policy runs in its own process. Scores come from code that is independent of every policy.
"""
