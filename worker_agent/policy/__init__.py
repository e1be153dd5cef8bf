"""Policy mode: this project's planner decides inside an engine's own EPLB, and the engine moves the weights."""
