"""Readers for other programs' files: engines' recorders, router traces, responses and tables."""
