"""When to decide, measured: changes found, false alarms, and what ours wins beside others that decide every window."""
