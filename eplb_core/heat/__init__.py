"""Heat (tokens per expert and step): the window of a decision, its online assembly, and source heat."""
