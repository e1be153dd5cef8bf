"""Proof from the ranks' records, step by step, that they always served one placement."""
