"""Decisions of the planner: layers to change, their new placement and tables, and the moves required."""
