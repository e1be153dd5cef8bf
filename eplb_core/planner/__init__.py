"""One decision: which layers are worth switching, to what placement, by which moves and tables."""
