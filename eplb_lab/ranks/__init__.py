"""A rank of the demo: live layers with an agent, beside the same layers left alone."""
