"""What the agent costs a real engine's requests: ``make bench-engine``."""
