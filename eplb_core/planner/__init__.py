"""The planner decides which layers to change, their new placement and tables, and the required moves."""
