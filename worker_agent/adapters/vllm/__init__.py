"""Adapter for vLLM: the agent replaces the balancer behind vLLM's ``EplbState``.

vLLM routes with the tables of ``EplbState``, stores the counts of chosen experts in it, and calls its ``step`` after
every forward pass. The adapter keeps the state and replaces ``step``. ``hooks`` patches vLLM, and ``host`` runs the
agent in a rank.
"""
