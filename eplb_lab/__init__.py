"""Test bench of eplb-service: a reference MoE layer, a small model, the demo, and the balancers of other projects.

The project's other packages do not import this one. ``eplb demo`` and ``eplb bench`` are registered as entry points of
the group ``eplb.commands``.
"""
