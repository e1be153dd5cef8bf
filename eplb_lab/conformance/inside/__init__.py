"""Modules that run in the processes of the engine under test. They import nothing else from ``eplb_lab``."""
