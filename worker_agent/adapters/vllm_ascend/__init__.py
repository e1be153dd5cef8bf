"""Balances vLLM-Ascend's MoE layers: the agent takes the place of its ``EplbUpdator`` and of the processes behind it.

The host keeps its own switches (``dynamic_eplb``), layers, maps and counters. ``hooks`` patches it, its model runner
calls ``host`` in a rank, and ``weights`` has the tensors that an expert is made of.
"""
