"""Heat: tokens per expert and step. Windows that a decision looks at, gathered online; synthetic heat."""
