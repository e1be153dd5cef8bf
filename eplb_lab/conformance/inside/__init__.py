"""Modules that run in the processes of the engine under test. They import nothing else of ``eplb_lab``."""
