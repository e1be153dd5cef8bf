"""Readers for the files of other programs: engines' recorders, router traces, responses and tables."""
