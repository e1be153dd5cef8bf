"""Checker of recorded histories: it verifies, step by step, that the ranks of a group always had one placement."""
