"""Heat (tokens per expert and step): a decision's window, its online assembly, and source heat."""
