"""Test bench of eplb-service: a reference MoE layer, a small model, the demo and other projects' balancers.

No other package imports this one. ``eplb demo`` and ``eplb bench`` find it through the entry points of the group
``eplb.commands``.
"""
