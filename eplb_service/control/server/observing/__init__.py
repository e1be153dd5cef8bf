"""What is kept of deployments for pictures and metrics; nothing depends on it."""
