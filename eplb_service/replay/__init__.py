"""The planner run along a recorded trace, scored by what each decision realises in the steps after it."""
