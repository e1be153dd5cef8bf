"""Replays of recorded traces: the planner decides as it would online, and each decision is scored on later steps."""
