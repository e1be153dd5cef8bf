"""Balances vLLM-Ascend's MoE layers: the agent takes the place of its ``EplbUpdator`` and of the processes behind it.

The host keeps its own switches (``dynamic_eplb``), layers, maps and counters. ``plugin`` is the entry point, ``hooks``
what is patched, ``balancer`` what the model runner calls in a rank, ``weights`` which tensors an expert is made of,
``layer`` what the agent sees of a layer.
"""
