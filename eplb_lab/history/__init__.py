"""Checker for recorded histories. It verifies that all ranks of a group had the same placement at every step."""
