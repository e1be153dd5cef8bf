"""Stage of the demo: runs rank processes with a service, scores their balance, and shows it."""
