"""Balances vLLM's own expert-parallel layers: its EPLB state is served by the agent instead of its own balancer.

vLLM routes through ``EplbState``: tables in, counts of chosen experts out, one call of ``step`` after every forward
pass. The adapter keeps all that and replaces what ``step`` does: ``hooks`` patches vLLM, ``host`` runs in a rank.
"""
