"""When to decide, measured: changes found, false alarms, and deciding on change beside deciding by the clock."""
