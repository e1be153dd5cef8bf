"""Policies that tests give by name."""
