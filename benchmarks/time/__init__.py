"""What planning for time wins over balancing tokens, under a measured cost curve: ``make bench-time``."""
